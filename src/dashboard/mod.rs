//! The dashboard: a page, and the API that it reads (`/v1/jobs`). The same page shows the batches of a
//! service and the outputs of a command line.
//!
//! * `source`: where jobs come from; `hub`: what all requests share; `view`: jobs as the API shows
//!   them.
//! * `history`, `detail`: what a single job has besides; `rows` and `prompts`: its rows.
//! * `events`: streams of changes; `requests`: the endpoints; `error`: refusals.
//! * `page`: the page itself; `guard`: what protects a dashboard without keys.
//!
//! See docs/decisions/093-a-dashboard-reads-when-somebody-looks.md.

mod detail;
mod error;
mod events;
mod guard;
mod history;
mod hub;
mod page;
mod prompts;
mod requests;
mod rows;
mod source;
mod view;

pub use error::ApiError;
pub use guard::{check_local_request, check_site};
pub use hub::Hub;
pub use page::show_page;
pub use requests::{ExtendRequest, PAGE_MAX, ROWS_MAX, routes};
pub use source::{Command, JobIds, JobSource, Viewer};
pub use view::{Frame, JobList, JobView, Kind, Rights, RowList, Rows, Tokens};

#[cfg(test)]
mod tests;
