//! What a proxy saw: requests by method and kind of key, faults by name.

use std::collections::BTreeMap;

/// What a key is to the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A listing.
    List,
    /// `_gristmill/job.json`.
    Job,
    Log,
    Data,
    Attempt,
    Commit,
    Control,
    Generation,
    Spend,
    Stage,
    /// A published part.
    Part,
    Success,
    /// Inputs, models, anything else.
    Other,
}

impl Kind {
    /// The kind of a request's path and query.
    pub(crate) fn of(target: &str) -> Kind {
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        if query.contains("list-type=") {
            return Kind::List;
        }
        let name = path.rsplit('/').next().unwrap_or_default();
        let Some((_, below)) = path.split_once("/_gristmill/") else {
            return match name {
                "_SUCCESS" => Kind::Success,
                _ if name.starts_with("part-") => Kind::Part,
                _ => Kind::Other,
            };
        };
        // The last folder with a meaning decides: generations repeat the folders of the first one below their own.
        let mut kind = match below {
            "job.json" => Kind::Job,
            _ => Kind::Other,
        };
        for folder in below.split('/') {
            kind = match folder {
                "log" => Kind::Log,
                "data" => Kind::Data,
                "attempts" => Kind::Attempt,
                "commits" => Kind::Commit,
                "control" => Kind::Control,
                "gen" => Kind::Generation,
                "spend" => Kind::Spend,
                "tmp" => Kind::Stage,
                _ => kind,
            };
        }
        kind
    }
}

/// Sums since the start, or since they were last taken.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counters {
    /// Requests that arrived, broken ones included: retries of the client count each.
    pub requests: BTreeMap<(String, Kind), u64>,
    pub faults: BTreeMap<&'static str, u64>,
    /// Requests by the access key that signed them.
    pub access_keys: BTreeMap<String, u64>,
}

impl Counters {
    pub(crate) fn requests(&self) -> u64 {
        self.requests.values().sum()
    }

    /// Requests about keys of this kind.
    pub(crate) fn of_kind(&self, kind: Kind) -> u64 {
        self.requests
            .iter()
            .filter(|((_, found), _)| *found == kind)
            .map(|(_, count)| count)
            .sum()
    }

    /// Requests with this method.
    pub(crate) fn of_method(&self, method: &str) -> u64 {
        self.requests
            .iter()
            .filter(|((found, _), _)| found == method)
            .map(|(_, count)| count)
            .sum()
    }

    pub(crate) fn faults(&self) -> u64 {
        self.faults.values().sum()
    }
}
