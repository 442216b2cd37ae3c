//! Watches for a cloud's notice that it will take this spot machine away, so that the worker stops
//! in good order before.
//!
//! - AWS: `latest/meta-data/spot/instance-action` answers 404 until two minutes before the end, behind a session token
//!   (IMDSv2). <https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html>
//! - Google Cloud: `computeMetadata/v1/instance/preempted` answers `TRUE` 30 seconds before the
//!   end. <https://cloud.google.com/compute/docs/instances/create-use-preemptible>

use std::time::Duration;

use crate::worker::stop::{Stop, StopCause};

/// Environment variable that overrides the address of the metadata service.
pub const ADDRESS: &str = "GRISTMILL_METADATA_URL";

const AWS: &str = "http://169.254.169.254";
const GCP: &str = "http://metadata.google.internal";
/// AWS asks for at most one request every five seconds.
const POLL_EVERY: Duration = Duration::from_secs(5);
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
const TOKEN_SECONDS: &str = "21600";

/// Whose machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Cloud {
    Aws,
    Gcp,
}

/// Watches in the background, and sets `stop` when the machine is about to be taken away.
///
/// # Errors
/// The HTTP client cannot be built.
pub fn watch(cloud: Cloud, stop: Stop) -> reqwest::Result<()> {
    let client = reqwest::Client::builder().timeout(ANSWER_TIMEOUT).no_proxy().build()?;
    let default = match cloud {
        Cloud::Aws => AWS,
        Cloud::Gcp => GCP,
    };
    let address = std::env::var(ADDRESS).unwrap_or_else(|_| default.to_string());
    let address = address.trim_end_matches('/').to_string();
    tokio::spawn(async move {
        let mut failures: u32 = 0;
        let mut ticks = tokio::time::interval(POLL_EVERY);
        loop {
            ticks.tick().await;
            let is_preempted = match cloud {
                Cloud::Aws => has_aws_notice(&client, &address).await,
                Cloud::Gcp => has_gcp_notice(&client, &address).await,
            };
            match is_preempted {
                Ok(true) => {
                    tracing::warn!("this machine will be taken away: the worker leaves in good order");
                    stop.set(StopCause::Preempted);
                    return;
                }
                Ok(false) => failures = 0,
                Err(error) => {
                    failures += 1;
                    if failures == 3 {
                        tracing::warn!("the metadata service does not answer, so no notice can come: {error}");
                    }
                }
            }
        }
    });
    Ok(())
}

async fn has_aws_notice(client: &reqwest::Client, address: &str) -> reqwest::Result<bool> {
    let token = client
        .put(format!("{address}/latest/api/token"))
        .header("X-aws-ec2-metadata-token-ttl-seconds", TOKEN_SECONDS)
        .send()
        .await?
        .error_for_status()?
        .text()
        .await?;
    let answer = client
        .get(format!("{address}/latest/meta-data/spot/instance-action"))
        .header("X-aws-ec2-metadata-token", token)
        .send()
        .await?;
    match answer.status() {
        reqwest::StatusCode::NOT_FOUND => Ok(false),
        _ => answer.error_for_status().map(|_| true),
    }
}

async fn has_gcp_notice(client: &reqwest::Client, address: &str) -> reqwest::Result<bool> {
    let answer = client
        .get(format!("{address}/computeMetadata/v1/instance/preempted"))
        .header("Metadata-Flavor", "Google")
        .send()
        .await?
        .error_for_status()?;
    Ok(answer.text().await?.trim() == "TRUE")
}
