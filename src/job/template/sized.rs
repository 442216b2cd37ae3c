//! Filters and methods whose result may be much larger than their input. The size of the result is
//! checked before it is computed.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters};

use super::{budget, meter};

/// Adds the filters to an environment.
pub(super) fn install(env: &mut Environment<'static>) {
    let wrapped_filters: [(&str, Value); 18] = [
        ("list", Value::from_function(filters::list)),
        ("sort", Value::from_function(filters::sort)),
        ("unique", Value::from_function(filters::unique)),
        ("select", Value::from_function(filters::select)),
        ("reject", Value::from_function(filters::reject)),
        ("selectattr", Value::from_function(filters::selectattr)),
        ("rejectattr", Value::from_function(filters::rejectattr)),
        ("map", Value::from_function(filters::map)),
        ("groupby", Value::from_function(filters::groupby)),
        ("zip", Value::from_function(filters::zip)),
        ("min", Value::from_function(filters::min)),
        ("max", Value::from_function(filters::max)),
        ("batch", Value::from_function(filters::batch)),
        ("slice", Value::from_function(filters::slice)),
        ("split", Value::from_function(filters::split)),
        ("lines", Value::from_function(filters::lines)),
        ("join", Value::from_function(filters::join)),
        ("replace", Value::from_function(filters::replace)),
    ];
    for (name, filter) in wrapped_filters {
        env.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
            let args: Vec<Value> = args.0.into_iter().map(ValueOrKwargs::into_value).collect();
            check_result(name, &args)?;
            filter.call(state, &args)
        });
    }
    let sum = Value::from_function(filters::sum);
    env.add_filter(
        "sum",
        move |state: &mut State, values: Value, attribute: Option<String>, start: Option<Value>, kwargs: Kwargs| {
            let attribute = attribute.map_or_else(|| kwargs.get("attribute"), |attribute| Ok(Some(attribute)))?;
            let start = start.map_or_else(|| kwargs.get("start"), |start| Ok(Some(start)))?;
            kwargs.assert_all_used()?;
            let start: Value = start.unwrap_or_else(|| Value::from(0));
            sum_items(&sum, state, values, &attribute.into(), start)
        },
    );
    let chain = Value::from_function(filters::chain);
    env.add_filter("chain", move |state: &mut State, args: Rest<Value>| {
        let chained = chain.call(state, &args.0)?;
        // A lookup in a chain of mappings searches one after the other, so the chain is copied to
        // one mapping.
        match chained.kind() {
            ValueKind::Map => copy_map(&chained),
            _ => Ok(chained),
        }
    });
}

/// The filter `sum`. A partial sum of texts or lists contains the one before it, so partial sums are
/// computed one by one, and each is charged as in a loop.
fn sum_items(sum: &Value, state: &mut State, values: Value, attribute: &Value, start: Value) -> Result<Value, Error> {
    // A sum of numbers is a number, which needs no check.
    if start.is_number() || values.is_undefined() {
        return sum.call(state, &[values, attribute.clone(), start]);
    }
    check_result("sum", std::slice::from_ref(&values))?;
    let mut total = start;
    for item in values.try_iter()?.checked() {
        let one = Value::from(vec![item?]);
        total = meter::charge_sum(sum.call(state, &[one, attribute.clone(), total])?)?;
    }
    Ok(total)
}

fn copy_map(map: &Value) -> Result<Value, Error> {
    let keys = map.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    budget::charge_items(keys.len())?;
    let pairs = keys.into_iter().map(|key| Ok((key.clone(), map.get_item(&key)?)));
    Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
}

/// Checks the size of the result of the filter or method `name`. The first of `args` is the value
/// that it is applied to.
pub(in crate::job) fn check_result(name: &str, args: &[Value]) -> Result<(), Error> {
    let Some(value) = args.first() else { return Ok(()) };
    let text = |at: usize| args.get(at).and_then(Value::as_str);
    match name {
        "replace" => {
            if let (Some(value), Some(from), Some(to)) = (text(0), text(1), text(2)) {
                check_replace(value, from, to)?;
            }
        }
        "split" | "rsplit" | "lines" | "splitlines" => {
            if let Some(value) = text(0) {
                check_split(value, text(1))?;
            }
        }
        "join" => check_join(text(1).unwrap_or_default(), value)?,
        "batch" | "slice" => {
            let count = args.get(1).and_then(Value::as_usize).unwrap_or_default();
            budget::check_items(count)?;
            let fill = args.get(2).map(budget::weigh).transpose()?.unwrap_or_default();
            budget::check_fits(fill.bytes.saturating_mul(count))?;
            check_characters(value)?;
        }
        _ => check_characters(value)?,
    }
    Ok(())
}

/// Checks the length of a text as a list of characters: some filters treat texts so.
fn check_characters(value: &Value) -> Result<(), Error> {
    budget::check_items(value.as_str().map_or(0, str::len))
}

fn check_replace(text: &str, from: &str, to: &str) -> Result<(), Error> {
    let bytes_max = (text.len() / from.len().max(1) + 1).saturating_mul(to.len());
    // Occurrences are counted only if their maximum number would not fit.
    if !budget::fits(bytes_max) {
        budget::check_fits(text.matches(from).count().saturating_mul(to.len()))?;
    }
    Ok(())
}

fn check_split(text: &str, separator: Option<&str>) -> Result<(), Error> {
    if text.len() <= budget::ITEMS_MAX {
        return Ok(());
    }
    budget::check_items(match separator {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count().max(text.lines().count()),
    })
}

/// Checks the size of the text of all items of `list` with `separator` between them.
pub(in crate::job) fn check_join(separator: &str, list: &Value) -> Result<(), Error> {
    check_characters(list)?;
    let items = list.len().unwrap_or_default();
    budget::check_fits(items.saturating_mul(separator.len()))
}

/// Checks the size of a formatted text with `fields` fields, each of which may hold any of `args`.
pub(in crate::job) fn check_format(fields: usize, args: &[Value]) -> Result<(), Error> {
    let mut bytes_max = 0;
    for arg in args {
        bytes_max = bytes_max.max(budget::weigh(arg)?.bytes);
    }
    budget::check_fits(fields.saturating_mul(bytes_max))
}

/// Checks the size of a text whose lines are indented by `indent` bytes.
pub(in crate::job) fn check_indent(text: &str, indent: usize) -> Result<(), Error> {
    budget::check_fits((text.matches('\n').count() + 1).saturating_mul(indent))
}
