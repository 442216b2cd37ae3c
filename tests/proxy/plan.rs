//! Which request meets which fault: seeded rules, no clock, no I/O.

use std::time::Duration;

/// What can happen to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Answered with this status; the store never sees the request.
    ErrorBefore(u16),
    /// The store applies the request; the client hears this status.
    ErrorAfter(u16),
    /// The connection is reset; the store never sees the request.
    ResetBefore,
    /// The store applies the request; then the connection is reset.
    ResetAfter,
    /// 409 `ConditionalRequestConflict`, not applied.
    Conflict,
    /// 429 `SlowDown`, not applied.
    SlowDown,
    /// Half of the response's body, then the connection ends.
    Truncate,
    /// Nothing for so long, then as usual: a client with a shorter timeout leaves, and the store never sees the request.
    StallBefore(Duration),
    /// The store applies the request; the answer comes so much later.
    StallAfter(Duration),
    /// Answered with 500 now; the store gets the request so much later.
    Delayed(Duration),
}

impl Fault {
    /// The fault's name in counters, the same for all durations and statuses.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Fault::ErrorBefore(_) => "error-before",
            Fault::ErrorAfter(_) => "error-after",
            Fault::ResetBefore => "reset-before",
            Fault::ResetAfter => "reset-after",
            Fault::Conflict => "conflict",
            Fault::SlowDown => "slow-down",
            Fault::Truncate => "truncate",
            Fault::StallBefore(_) => "stall-before",
            Fault::StallAfter(_) => "stall-after",
            Fault::Delayed(_) => "delayed",
        }
    }

    /// Whether a store could do this to such a request: only puts arrive late, only conditional ones conflict, and only
    /// what has a body is cut short.
    fn fits(&self, request: &Request) -> bool {
        match self {
            Fault::Conflict => request.conditional,
            Fault::Delayed(_) => request.method == "PUT",
            Fault::Truncate => request.method == "GET",
            _ => true,
        }
    }
}

/// What a plan sees of a request.
#[derive(Debug, Clone, Default)]
pub(crate) struct Request {
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Carries `If-Match` or `If-None-Match`.
    pub conditional: bool,
}

/// One fault, and the requests that it meets.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    fault: Fault,
    method: Option<&'static str>,
    /// Text that path and query must contain.
    key: Option<String>,
    probability: f64,
    /// Matching requests that pass first.
    skip: u64,
    /// Faults that it makes at most.
    times: u64,
}

impl Rule {
    /// `fault` for every request that it fits.
    pub(crate) fn always(fault: Fault) -> Rule {
        Rule {
            fault,
            method: None,
            key: None,
            probability: 1.0,
            skip: 0,
            times: u64::MAX,
        }
    }

    /// `fault` for a share of the requests that it fits.
    pub(crate) fn sometimes(fault: Fault, probability: f64) -> Rule {
        Rule {
            probability,
            ..Rule::always(fault)
        }
    }

    /// Only for this method.
    pub(crate) fn on(mut self, method: &'static str) -> Rule {
        self.method = Some(method);
        self
    }

    /// Only where path and query contain `text`.
    pub(crate) fn at(mut self, text: impl Into<String>) -> Rule {
        self.key = Some(text.into());
        self
    }

    /// Only after so many matching requests have passed.
    pub(crate) fn skip(mut self, requests: u64) -> Rule {
        self.skip = requests;
        self
    }

    /// At most so often.
    pub(crate) fn times(mut self, faults: u64) -> Rule {
        self.times = faults;
        self
    }

    fn matches(&self, request: &Request) -> bool {
        self.fault.fits(request)
            && self.method.is_none_or(|method| method == request.method)
            && self.key.as_ref().is_none_or(|key| request.target.contains(key))
    }
}

/// Rules in order, and the seed of their dice. The first rule that strikes decides.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    rules: Vec<Rule>,
    random: u64,
    /// Faults that it still makes.
    left: u64,
}

impl Plan {
    /// No faults.
    pub(crate) fn clean() -> Plan {
        Plan::new(0, Vec::new())
    }

    pub(crate) fn new(seed: u64, rules: Vec<Rule>) -> Plan {
        Plan {
            rules,
            random: seed,
            left: u64::MAX,
        }
    }

    /// Every kind of fault, together for about `share` of the requests. `stall` should exceed the client's timeout;
    /// a delayed put arrives after it too.
    pub(crate) fn mixed(seed: u64, share: f64, stall: Duration) -> Plan {
        let faults = [
            Fault::ErrorBefore(500),
            Fault::ErrorBefore(503),
            Fault::ErrorAfter(500),
            Fault::ErrorAfter(503),
            Fault::ResetBefore,
            Fault::ResetAfter,
            Fault::Conflict,
            Fault::SlowDown,
            Fault::Truncate,
            Fault::StallBefore(stall),
            Fault::StallAfter(stall),
            Fault::Delayed(stall),
        ];
        let each = share / faults.len() as f64;
        Plan::new(seed, faults.map(|fault| Rule::sometimes(fault, each)).into())
    }

    /// No more than so many faults in all.
    pub(crate) fn at_most(mut self, faults: u64) -> Plan {
        self.left = faults;
        self
    }

    /// The fault that `request` meets, if any. One call a request, in order of arrival.
    pub(crate) fn decide(&mut self, request: &Request) -> Option<Fault> {
        for number in 0..self.rules.len() {
            if !self.rules[number].matches(request) {
                continue;
            }
            // The dice fall once a matching rule, struck or not, so that one rule's bound does not shift the others'.
            let fell = self.dice();
            let rule = &mut self.rules[number];
            if rule.skip > 0 {
                rule.skip -= 1;
                continue;
            }
            if self.left > 0 && rule.times > 0 && fell < rule.probability {
                rule.times -= 1;
                self.left -= 1;
                return Some(rule.fault);
            }
        }
        None
    }

    /// Uniform in 0..1 (splitmix64).
    fn dice(&mut self) -> f64 {
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}
