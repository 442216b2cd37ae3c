//! `gristmill serve`: OpenAI's batch API. Batches become jobs, whose shards go to a queue or, with
//! `--work`, to a worker in this process.
//!
//! `start` does what takes time at the start, `models` opens the models, `jobs` creates jobs, `dispatch`
//! hands shards to workers, `closing` ends jobs without workers.

mod closing;
mod dispatch;
mod jobs;
mod models;
mod start;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::cli::args::ServeArgs;
use crate::cli::enqueue::QueueTarget;
use crate::cli::exit::{Exit, Failure};
use crate::cli::prepare::print_signing;
use crate::cli::serve::jobs::ServedJobs;
use crate::cli::serve::models::OpenModel;
use crate::cli::serve::start::{Answering, Preparation};
use crate::cli::setup::stop_on_signals;
use crate::dashboard::Hub;
use crate::dataset::store::location::Location;
use crate::http::{self, HttpLimits};
use crate::serve::driver::drive;
use crate::serve::keys::Keys;
use crate::serve::metrics::ServeMetrics;
use crate::serve::models::{ServedModel, load_models};
use crate::serve::service::Service;
use crate::serve::webhooks::Webhooks;
use crate::serve::webhooks::deliver::deliver;
use crate::serve::webhooks::schedule::Schedule;
use crate::serve::{dashboard_hub, metrics_router, router};
use crate::worker::metrics::Metrics;
use crate::worker::stop::{Stop, StopCause};

const HTTP_LIMITS: HttpLimits = HttpLimits {
    connections: 4096,
    header_timeout: Duration::from_secs(30),
    drain_timeout: Duration::from_secs(20),
};
const METRICS_LIMITS: HttpLimits = HttpLimits {
    connections: 16,
    header_timeout: Duration::from_secs(10),
    drain_timeout: Duration::ZERO,
};

pub(super) async fn serve(args: ServeArgs) -> Result<Exit, Failure> {
    let bad = |why: String| Failure::bad_job(anyhow!(why));
    let stop = Stop::default();
    stop_on_signals(stop.clone())?;
    print_signing(false)?;
    let keys = keys(&args)?;
    let webhooks = match &args.webhooks {
        Some(path) => Webhooks::load(path, &keys).map_err(bad)?,
        None => Webhooks::default(),
    };
    let mut models = load_models(&args.models).map_err(bad)?;
    let device = if args.work {
        args.engine.device.resolve()?
    } else {
        args.engine.device.resolve_for_workers()?
    };
    let opened = Arc::new(OpenModel::open_all(&mut models, device).await?);
    let here = std::env::current_dir()?;
    let root = Location::parse(&args.store, &here).map_err(Failure::bad_job)?;
    if root.is_web() {
        return Err(bad(
            "`--store`: a web server takes no files: give a folder or a bucket".into()
        ));
    }
    let answering = answering(&args, &models)?;
    let worker_metrics = match &answering {
        Answering::Here { metrics, .. } => Some(metrics.clone()),
        Answering::Workers(_) => None,
    };
    let metrics = ServeMetrics::new(worker_metrics)?;
    let service = Arc::new(Service::open(root, models, keys, webhooks, metrics).await?);
    if let Some(address) = args.metrics_port {
        let listener = bind("--metrics-port", address).await?;
        let router = metrics_router(service.clone());
        tokio::spawn(http::serve(listener, router, METRICS_LIMITS, std::future::pending()));
    }
    let listener = bind("--listen", args.listen).await?;
    eprintln!("gristmill serves http://{}/v1", listener.local_addr()?);
    let jobs = Arc::new(ServedJobs::new(opened.clone(), device));
    let pause = Duration::from_secs_f64(args.poll);
    let driver = spawn_until_stop(&stop, {
        let (service, jobs, stop) = (service.clone(), jobs.clone(), stop.clone());
        async move { drive(service, jobs, pause, stop.wait()).await }
    });
    let schedule = Schedule::new(Duration::from_secs_f64(args.webhook_retry_first));
    let deliverer = spawn_until_stop(&stop, {
        let (service, stop) = (service.clone(), stop.clone());
        async move { deliver(service, schedule, stop.wait()).await }
    });
    let dashboard = dashboard_hub(service.clone(), args.dashboard_prompts);
    close_dashboard_on(stop.clone(), dashboard.clone());
    let preparation = Preparation {
        args,
        answering,
        models: opened,
        device,
        jobs,
        service: service.clone(),
    };
    let work = spawn_until_stop(&stop, preparation.run(stop.clone()));
    http::serve(listener, router(service, dashboard), HTTP_LIMITS, stop.wait()).await;
    driver.await.context("the driver of batches panicked")?;
    deliverer.await.context("the deliverer of webhooks panicked")?;
    work.await.context("the worker panicked")??;
    Ok(match stop.why() {
        Some(StopCause::Failed) => Exit::Failure,
        _ => Exit::Interrupted,
    })
}

/// Ends the dashboard's streams at the stop, so that the service does not wait for them.
fn close_dashboard_on(stop: Stop, dashboard: Arc<Hub>) {
    tokio::spawn(async move {
        stop.wait().await;
        dashboard.close();
    });
}

/// Who answers the requests, by the options.
fn answering(args: &ServeArgs, models: &[ServedModel]) -> Result<Answering, Failure> {
    let bad = |why: String| Failure::bad_job(anyhow!(why));
    if !args.work {
        let target = QueueTarget::find(&args.queue, None)?;
        return target
            .map(|target| Answering::Workers(Box::new(target)))
            .ok_or_else(|| {
                bad("no queue: give `--queue URL` for workers elsewhere, or `--work` to answer in this process".into())
            });
    }
    match models {
        [model] => Ok(Answering::Here {
            model: model.name.clone(),
            metrics: Arc::new(Metrics::new()?),
        }),
        _ => Err(bad(format!(
            "`--work` answers with one model, and `--models` lists {}: give `--queue URL`, and workers for each model",
            models.len()
        ))),
    }
}

/// Stops the service if the task that holds this ends first, by a panic, too: its supervisor starts
/// it again.
struct StopOnDrop(Stop);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        if self.0.why().is_none() {
            self.0.set(StopCause::Failed);
        }
    }
}

/// Spawns a task that runs until the service stops. If it ends before, the service stops.
fn spawn_until_stop<Task>(stop: &Stop, task: Task) -> JoinHandle<Task::Output>
where
    Task: Future<Output: Send> + Send + 'static,
{
    let guard = StopOnDrop(stop.clone());
    tokio::spawn(async move {
        let _guard = guard;
        task.await
    })
}

async fn bind(option: &str, address: SocketAddr) -> Result<TcpListener, Failure> {
    let bound = TcpListener::bind(address).await;
    bound
        .with_context(|| format!("`{option}`: cannot listen at {address}"))
        .map_err(Failure::bad_job)
}

/// The accepted keys. Without keys, only this machine may reach the port.
fn keys(args: &ServeArgs) -> Result<Keys, Failure> {
    let bad = |why: String| Failure::bad_job(anyhow!(why));
    match &args.keys {
        Some(path) => Keys::load(path).map_err(bad),
        None if args.listen.ip().is_loopback() => Ok(Keys::Open),
        None => Err(bad(format!(
            "`--listen {}` lets everybody in who reaches it: give `--keys FILE`, or listen at a port of this machine alone",
            args.listen
        ))),
    }
}
