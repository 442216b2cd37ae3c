//! Before and after each boundary between the stages of a worker: abort, error and pause, over both brokers.
//!
//! Each life of a worker has one of them armed. When it struck, the next life has the next one.

use std::time::{Duration, Instant};

use gristmill::faults::points::POINTS;

use super::job::{Broker, Plan};
use super::scene::{END_MAX, LEAVE_MAX, Scene};
use super::services::Services;
use super::suite::Suite;
use super::worker_set::Ended;
use crate::support::is_full;

/// Past the session, and past the log interval.
const ACTIONS: [&str; 3] = ["abort", "error", "pause:2500"];
/// A point that no worker passes in this time is none.
const STRIKE_MAX: Duration = Duration::from_secs(40);
/// After a pause or an error, before the worker is told to leave: it shall go on working first.
const AFTERMATH: Duration = Duration::from_secs(2);
const WORKERS: usize = 3;
/// Only who ends the job passes it, and once: a test of its own has it armed in every worker.
const LAST: &str = "keeper.between-digest-and-success";

#[test]
fn failpoints_over_kafka() {
    failpoints("failpoints_over_kafka", Broker::Kafka);
}

#[test]
fn failpoints_over_rabbitmq() {
    failpoints("failpoints_over_rabbitmq", Broker::Rabbitmq);
}

#[test]
fn the_last_step_fails() {
    let name = "the_last_step_fails";
    let Some(services) = Services::of(name, &["kafka", "rabbitmq"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let plan = Plan {
        rows: 2_000,
        ..Plan::default()
    };
    for time in 0..suite.count(1, 6) as usize {
        let turn = suite.seed as usize + time;
        let mut scene = Scene::open(&mut suite, &services, Broker::ALL[turn % 2], &plan);
        let armed = format!("{LAST}={}@1", ACTIONS[turn % 3]);
        for _ in 0..WORKERS {
            scene.worker_set.hire(&[("GRISTMILL_FAILPOINTS", &armed)]);
        }
        // The next life has nothing armed.
        scene.tolerated = |ended| has_struck(ended) && may_end(ended, false);
        scene.until("that the point strikes", END_MAX, |scene| {
            let struck = |seat| scene.worker_set.log(seat).contains("failpoint `");
            scene.worker_set.lives() > WORKERS as u64 || (0..WORKERS).any(struck)
        });
        scene.conclude();
        suite.add("faults", 1);
    }
    suite.end();
}

/// One point with what it does.
#[derive(Debug, Clone)]
struct Cell {
    point: &'static str,
    armed: String,
}

/// A seat's life with one cell armed.
struct Life {
    cell: Cell,
    began: Instant,
    struck: Option<Instant>,
}

fn failpoints(name: &'static str, broker: Broker) {
    let Some(services) = Services::of(name, &[broker.name()]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let mut cells = matrix(&mut suite);
    suite.add("cells", cells.len() as u64);
    let plan = Plan {
        rows: 20_000,
        shard_rows: 150,
        ..Plan::default()
    };
    let mut faults = 0;
    while !cells.is_empty() {
        let mut scene = Scene::open(&mut suite, &services, broker, &plan);
        faults += play(&mut scene, &mut cells);
        scene.conclude();
    }
    suite.add("faults", faults);
    suite.end();
}

/// All cells in seeded order; in CI a third of them.
fn matrix(suite: &mut Suite) -> Vec<Cell> {
    let mut cells = Vec::new();
    for point in POINTS.iter().filter(|point| **point != LAST) {
        for action in ACTIONS {
            let pass = suite.random.within(1..4);
            let armed = format!("{point}={action}@{pass}");
            cells.push(Cell { point, armed });
        }
    }
    for i in (1..cells.len()).rev() {
        cells.swap(i, suite.random.within(0..i as u64 + 1) as usize);
    }
    if !is_full() {
        cells.truncate(cells.len() / 3);
    }
    cells
}

/// Plays cells until none is left or the job is over; what did not strike by then goes back. Returns how many struck.
fn play(scene: &mut Scene, cells: &mut Vec<Cell>) -> u64 {
    let mut lives: Vec<Option<Life>> = Vec::new();
    for _ in 0..WORKERS {
        let cell = cells.pop();
        let env = cell.as_ref().map(|cell| ("GRISTMILL_FAILPOINTS", cell.armed.as_str()));
        scene.worker_set.hire(env.as_slice());
        lives.push(cell.map(Life::new));
    }
    let mut struck = 0;
    while lives.iter().any(Option::is_some) && !scene.finished() {
        std::thread::sleep(Duration::from_millis(30));
        for (seat, place) in lives.iter_mut().enumerate() {
            let Some(life) = place else { continue };
            // Before its log, which then is whole.
            let ended = scene.worker_set.ended(seat);
            if life.struck.is_none()
                && scene
                    .worker_set
                    .log(seat)
                    .contains(&format!("failpoint `{}`", life.cell.point))
            {
                life.struck = Some(Instant::now());
                struck += 1;
            }
            match (life.struck, &ended) {
                (None, None) => {
                    let tail = || format!("`{}` never struck\n{}", life.cell.armed, scene.worker_set.tails());
                    assert!(life.began.elapsed() < STRIKE_MAX, "{}", tail());
                    continue;
                }
                // The job was over before the point was passed.
                (None, Some(ended)) if ended.job_is_over() => {
                    cells.extend(place.take().map(|life| life.cell));
                    continue;
                }
                (None, Some(ended)) => panic!("worker {seat} ended by itself ({}):\n{}", ended.status, ended.log),
                (Some(_), Some(ended)) => life.assert_end(ended, false),
                (Some(at), None) if at.elapsed() < AFTERMATH => continue,
                (Some(_), None) => {
                    let ended = scene.worker_set.dismiss(seat, LEAVE_MAX);
                    life.assert_end(&ended, true);
                }
            }
            let cell = cells.pop();
            let env = cell.as_ref().map(|cell| ("GRISTMILL_FAILPOINTS", cell.armed.as_str()));
            scene.worker_set.arm(seat, env.as_slice());
            scene.worker_set.begin(seat);
            *place = cell.map(Life::new);
        }
    }
    cells.extend(
        lives
            .into_iter()
            .flatten()
            .filter(|life| life.struck.is_none())
            .map(|life| life.cell),
    );
    // The armed ones may strike yet, while the job ends.
    scene.tolerated = |ended| has_struck(ended) && may_end(ended, false);
    struck
}

impl Life {
    fn new(cell: Cell) -> Life {
        Life {
            cell,
            began: Instant::now(),
            struck: None,
        }
    }

    #[track_caller]
    fn assert_end(&self, ended: &Ended, told: bool) {
        let armed = &self.cell.armed;
        assert!(
            may_end(ended, told),
            "`{armed}`: the worker ended with {}:\n{}",
            ended.status,
            ended.log
        );
    }
}

fn has_struck(ended: &Ended) -> bool {
    ended.log.contains("gristmill: failpoint `")
}

/// Whether a worker may end so after what has struck, which its log names; `told`: to leave. Only an abort is a signal's work, and
/// only an error may be a failure.
fn may_end(ended: &Ended, told: bool) -> bool {
    let code = ended.status.code();
    let in_order = ended.job_is_over() || (told && code == Some(6));
    if ended.log.contains("`: Abort at pass") {
        ended.aborted()
    } else if ended.log.contains("`: Error at pass") {
        in_order || code == Some(1)
    } else {
        in_order
    }
}
