//! Options that name a number format.

use clap::builder::{PossibleValuesParser, TypedValueParser};

use crate::device::Precision;
use crate::job::precision::{RequestedKvFormat, RequestedPrecision};
use crate::job::recheck::Recheck;

/// Any format, or `auto`.
pub(super) fn requested_precision() -> impl TypedValueParser<Value = RequestedPrecision> {
    PossibleValuesParser::new(RequestedPrecision::names()).try_map(|word| word.parse::<RequestedPrecision>())
}

/// Any format of keys and values, or `auto`.
pub(super) fn requested_kv_format() -> impl TypedValueParser<Value = RequestedKvFormat> {
    PossibleValuesParser::new(RequestedKvFormat::names()).try_map(|word| word.parse::<RequestedKvFormat>())
}

/// The formats that a recheck computes in.
pub(super) fn recheck_precision() -> impl TypedValueParser<Value = Precision> {
    one_of(&Recheck::PRECISIONS)
}

/// The formats that a GPU computes in.
pub(super) fn gpu_precision() -> impl TypedValueParser<Value = Precision> {
    one_of(&Precision::ON_GPU)
}

fn one_of(formats: &[Precision]) -> impl TypedValueParser<Value = Precision> + use<> {
    let words = formats.iter().map(|format| format.name());
    PossibleValuesParser::new(words).try_map(|word| Precision::from_name(&word).ok_or("no number format has this name"))
}
