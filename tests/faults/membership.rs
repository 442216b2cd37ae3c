//! Workers join and leave while the job runs: partitions move, finished rows are written before they do.

use super::job::{Broker, Plan};
use super::kills::random_awake;
use super::scene::{LEAVE_MAX, Scene, Storm};
use super::services::Services;
use super::suite::Suite;

const WORKERS_MAX: usize = 5;

#[test]
fn workers_join_and_leave() {
    let name = "workers_join_and_leave";
    let Some(services) = Services::of(name, &["kafka"]) else {
        return;
    };
    let mut suite = Suite::begin(name);
    let storm = Storm {
        faults: suite.count(20, 300),
        workers: 2,
        gap_ms: 300..1_700,
        plan: Plan {
            rows: 24_000,
            ..Plan::default()
        },
    };
    storm.rage(&mut suite, &services, &[Broker::Kafka], join_or_leave);
    suite.end();
}

fn join_or_leave(scene: &mut Scene) -> u64 {
    let awake = scene.worker_set.awake().len();
    let leave = awake >= WORKERS_MAX || (awake > 1 && scene.suite.random.coin());
    if !leave {
        match scene.worker_set.vacant() {
            Some(seat) => scene.worker_set.begin(seat),
            None => {
                scene.worker_set.hire(&[]);
            }
        }
        return 1;
    }
    let Some(seat) = random_awake(scene) else { return 0 };
    scene.worker_set.dismiss(seat, LEAVE_MAX).assert_left();
    1
}
