//! Inserts meters between a template's instructions. A meter after each instruction that creates a
//! value charges the value to the rendering's budget.
//!
//! A meter is a filter that returns its input; templates cannot write its name. Products of a text
//! or list with a number, and lists that are spread into arguments, are checked by a meter before
//! the instruction that creates them.

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

use super::budget;

/// After instructions whose result consists of parts of existing values.
const REUSED: &str = "<taken>";
/// After instructions whose result may be larger or deeper than their inputs.
const BUILT: &str = "<built>";
/// Like [`BUILT`], after sums and ranges. minijinja computes sums of lists lazily, and they stay so.
const SUMMED: &str = "<summed>";
/// Before a value is stored in a namespace.
const STORED: &str = "<kept>";
/// Before a product, for both factors.
const FACTORS: &str = "<times>";
/// Before a slice whose step may be negative, for the value and its three numbers.
const SLICED: &str = "<backwards>";
/// Before lists are spread into arguments, for all of them.
const SPREAD: &str = "<spread>";
/// At each iteration of a loop.
const ITERATION: &str = "<turn>";

/// All meters, in the order of their slots in minijinja's cache of filters.
const METERS: [&str; 8] = [REUSED, BUILT, SUMMED, STORED, FACTORS, SLICED, SPREAD, ITERATION];
/// Number of slots in minijinja's cache of filters; each list of instructions has a cache.
const FILTER_SLOTS: u8 = 50;
/// Minimum length of literal text that is charged if it may be repeated; the limit of steps bounds
/// the amount of shorter text.
const RAW_BYTES_MIN: usize = 24;
/// Maximum number of lists that one call spreads into its arguments.
const SPREADS_MAX: usize = 8;

/// Filters that return numbers or booleans.
const SCALAR_FILTERS: [&str; 7] = ["length", "count", "int", "float", "abs", "round", "bool"];
/// Filters whose result consists of parts of their input, or is a text.
const PART_FILTERS: [&str; 30] = [
    "first",
    "last",
    "list",
    "sort",
    "unique",
    "reverse",
    "select",
    "selectattr",
    "reject",
    "rejectattr",
    "default",
    "d",
    "split",
    "lines",
    "min",
    "max",
    "attr",
    "string",
    "trim",
    "upper",
    "lower",
    "title",
    "capitalize",
    "replace",
    "join",
    "tojson",
    "indent",
    "format",
    "escape",
    "e",
];

/// Adds the meters to an environment.
pub(super) fn install(env: &mut Environment<'static>) {
    env.add_filter(REUSED, |value: ValueOrKwargs| charge_reused(value.into_value()));
    env.add_filter(BUILT, |value: ValueOrKwargs| charge_new(value.into_value()));
    env.add_filter(SUMMED, |value: ValueOrKwargs| charge_sum(value.into_value()));
    env.add_filter(STORED, |value: ValueOrKwargs| check_stored(value.into_value()));
    env.add_filter(ITERATION, |value: ValueOrKwargs| {
        budget::step().map(|()| value.into_value())
    });
    env.add_filter(FACTORS, |factors: Value| check_product(&factors));
    env.add_filter(SLICED, |parts: Value| fix_empty_slice(&parts));
    env.add_filter(SPREAD, |lists: Value| charge_spread(&lists));
}

fn charge_reused(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => budget::charge(value.as_str().unwrap_or_default().len())?,
        ValueKind::Iterable => return materialized(&value),
        ValueKind::Seq | ValueKind::Map => budget::charge_items(value.len().unwrap_or_default())?,
        _ => budget::step()?,
    }
    Ok(value)
}

fn charge_new(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Iterable => {
            let value = materialized(&value)?;
            budget::charge_built(&value)?;
            Ok(value)
        }
        _ => charge_sum(value),
    }
}

/// Charges a sum by its whole content: that of earlier sums in it counts again.
pub(super) fn charge_sum(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => budget::charge(value.as_str().unwrap_or_default().len())?,
        _ if budget::is_container(&value) => budget::charge_built(&value)?,
        _ => budget::step()?,
    }
    Ok(value)
}

fn check_stored(value: Value) -> Result<Value, Error> {
    if budget::is_mutable(&value) {
        return Err(budget::refuse("it puts a namespace or a loop into a namespace"));
    }
    if budget::is_container(&value) {
        budget::charge_built(&value)?;
    }
    Ok(value)
}

/// Checks the size of a product. Returns the factors last one first, since unpacking reverses them.
fn check_product(factors: &Value) -> Result<Value, Error> {
    let (left, right) = (factors.get_item_by_index(0)?, factors.get_item_by_index(1)?);
    for (value, times) in [(&left, &right), (&right, &left)] {
        let Some(times) = times.as_usize() else { continue };
        if let Some(text) = value.as_str() {
            budget::check_fits(text.len().saturating_mul(times))?;
        } else if budget::is_container(value) {
            let weight = budget::weigh(value)?;
            budget::check_items(weight.values.saturating_mul(times))?;
            budget::check_fits(weight.bytes.saturating_mul(times))?;
        }
    }
    Ok(Value::from(Tuple::from([right, left])))
}

/// Replaces a negative step by 1 if the sliced value is empty: minijinja panics on walking backwards
/// through an empty value. Returns the value and the three numbers, last one first.
fn fix_empty_slice(parts: &Value) -> Result<Value, Error> {
    let mut all = parts.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    let is_empty = |value: &Value| value.try_iter().is_ok_and(|mut items| items.next().is_none());
    if let [value, _, _, step] = &mut all[..]
        && step.as_i64().is_some_and(|step| step < 0)
        && is_empty(value)
    {
        *step = Value::from(1);
    }
    all.reverse();
    Ok(Value::from(Tuple::from(all)))
}

/// Charges lists that are spread into arguments. Returns them last one first.
fn charge_spread(lists: &Value) -> Result<Value, Error> {
    let mut all = lists.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    let items = all.iter().map(|list| list.len().unwrap_or_default());
    budget::charge_items(items.fold(0, usize::saturating_add))?;
    all.reverse();
    Ok(Value::from(Tuple::from(all)))
}

/// Computes all items of a lazy value: iterating over many nested lazy values would need a stack of
/// that depth. Templates see the same value, and a length only if they saw one before.
fn materialized(value: &Value) -> Result<Value, Error> {
    let has_length = value.len().is_some();
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        items.push(item?);
        budget::check_items(items.len())?;
    }
    budget::charge_items(items.len())?;
    Ok(if has_length {
        Value::make_object_iterable(items, |items| Box::new(items.iter().cloned()))
    } else {
        Value::make_object_iterable(items, |items| {
            let mut items = items.iter();
            // Unlike the vector's iterator, this one has no known length.
            Box::new(std::iter::from_fn(move || items.next().cloned()))
        })
    })
}

/// Returns the instructions with meters; the error is one line. `repeats` says whether instructions
/// may run more than once.
pub(super) fn metered<'a>(unmetered: &Instructions<'a>, repeats: bool) -> Result<Instructions<'a>, String> {
    let all: Vec<&Instruction<'a>> = (0..).map_while(|index| unmetered.get(index)).collect();
    let slots = FilterSlots::of(&all);
    let mut out = Vec::with_capacity(all.len() * 2);
    let mut starts = Vec::with_capacity(all.len() + 1);
    for index in 0..all.len() {
        starts.push(out.len() as u32);
        for instruction in with_meters(&all, index, repeats, &slots)? {
            out.push((instruction, index as u32));
        }
    }
    starts.push(out.len() as u32);
    let mut metered = Instructions::new(unmetered.name(), unmetered.source());
    for (mut instruction, source_index) in out {
        if let Some(target) = jump_target(&mut instruction) {
            let new_target = starts.get(*target as usize);
            *target = *new_target.ok_or("its instructions jump nowhere")?;
        }
        match unmetered.get_span(source_index) {
            Some(span) => metered.add_with_span(instruction, span),
            None => metered.add_with_line(instruction, unmetered.get_line(source_index).unwrap_or_default() as u16),
        };
    }
    Ok(metered)
}

/// Whether some of these instructions may run more than once: in a loop or a macro.
pub(super) fn repeats(unmetered: &Instructions) -> bool {
    (0..)
        .map_while(|index| unmetered.get(index))
        .any(|instruction| matches!(instruction, Instruction::Iterate(_) | Instruction::BuildMacro(..)))
}

/// The instruction at `index` with its meters.
fn with_meters<'a>(
    all: &[&Instruction<'a>],
    index: usize,
    repeats: bool,
    slots: &FilterSlots,
) -> Result<Vec<Instruction<'a>>, String> {
    use Instruction::*;
    let instruction = all[index].clone();
    let meter = |name: &'static str| ApplyFilter(name, Some(1), slots.slot_of(name));
    let metered = |name: &'static str| vec![all[index].clone(), meter(name)];
    Ok(match all[index] {
        EmitRaw(raw) if repeats && raw.len() >= RAW_BYTES_MIN => vec![LoadConst(Value::from(*raw)), Emit],
        Slice if !steps_forwards(index.checked_sub(1).map(|before| all[before])) => {
            vec![
                BuildTuple(Some(4)),
                meter(SLICED),
                UnpackList(4),
                instruction,
                meter(REUSED),
            ]
        }
        StringConcat | Slice | Add if is_charged_next(&all[index + 1..]) => vec![instruction],
        StringConcat | Slice | EndCapture => metered(REUSED),
        Add => metered(SUMMED),
        BuildList(_) | BuildTuple(_) | BuildMap(_) | CallMethod(..) | CallObject(_) => metered(BUILT),
        CallFunction("range", _) => metered(SUMMED),
        CallFunction(..) => metered(BUILT),
        ApplyFilter(name, ..) if SCALAR_FILTERS.contains(name) => vec![instruction],
        ApplyFilter(name, ..) if PART_FILTERS.contains(name) => {
            if is_charged_next(&all[index + 1..]) {
                vec![instruction]
            } else {
                metered(REUSED)
            }
        }
        ApplyFilter(..) => metered(BUILT),
        // The two factors are packed into one value for the meter, and unpacked again.
        Mul => vec![
            BuildTuple(Some(2)),
            meter(FACTORS),
            UnpackList(2),
            instruction,
            meter(BUILT),
        ],
        SetAttr(_) => vec![Swap, meter(STORED), Swap, instruction],
        Iterate(end) if needs_iteration_meter(all.get(index..*end as usize).unwrap_or_default()) => metered(ITERATION),
        UnpackLists(lists) if *lists > SPREADS_MAX => {
            return Err(format!(
                "a call spreads more than {SPREADS_MAX} lists into its arguments"
            ));
        }
        UnpackLists(lists) => vec![BuildTuple(Some(*lists)), meter(SPREAD), UnpackList(*lists), instruction],
        _ => vec![instruction],
    })
}

/// Whether a slice's step is a constant that is not negative; `step` is the instruction that loads
/// it, the last one before the slice.
fn steps_forwards(step: Option<&Instruction>) -> bool {
    match step {
        Some(Instruction::LoadConst(step)) => step.is_none() || step.as_usize().is_some(),
        _ => false,
    }
}

/// Whether the following instructions charge the result anyway: they emit it, or concatenate it with
/// a constant.
fn is_charged_next(following: &[&Instruction]) -> bool {
    use Instruction::*;
    matches!(following, [Emit, ..] | [LoadConst(_), Add | StringConcat, ..])
}

/// Whether an iteration of a loop with this body may take long although it has no other meter.
/// Comparisons with constants and tests of a value's kind take little time.
fn needs_iteration_meter(body: &[&Instruction]) -> bool {
    use Instruction::*;
    const KINDS: [&str; 10] = [
        "defined",
        "undefined",
        "none",
        "string",
        "mapping",
        "sequence",
        "iterable",
        "boolean",
        "number",
        "true",
    ];
    let is_with_constant = |index: usize| index > 0 && matches!(body[index - 1], LoadConst(_));
    body.iter().enumerate().any(|(index, instruction)| match instruction {
        Eq | Ne | Gt | Gte | Lt | Lte => !is_with_constant(index),
        In | CompareAndPreserve(_) => true,
        PerformTest(name, ..) => !KINDS.contains(name),
        ApplyFilter(name, ..) => SCALAR_FILTERS.contains(name),
        _ => false,
    })
}

/// The jump target of an instruction.
fn jump_target<'i>(instruction: &'i mut Instruction) -> Option<&'i mut u32> {
    use Instruction::*;
    match instruction {
        Jump(to) | JumpIfFalse(to) | JumpIfFalseOrPop(to) | JumpIfTrueOrPop(to) | Iterate(to) => Some(to),
        BuildMacro(_, to, _) => Some(to),
        _ => None,
    }
}

/// The free slots in minijinja's cache of filters; the template's own filters have the first ones.
struct FilterSlots {
    first_free: u8,
}

impl FilterSlots {
    fn of(all: &[&Instruction]) -> FilterSlots {
        let used = all.iter().filter_map(|instruction| match instruction {
            Instruction::ApplyFilter(_, _, slot) if *slot < FILTER_SLOTS => Some(slot + 1),
            _ => None,
        });
        FilterSlots {
            first_free: used.max().unwrap_or(0),
        }
    }

    /// The slot of a meter; `!0` means no slot, so that the filter is looked up each time.
    fn slot_of(&self, name: &str) -> u8 {
        let index = METERS.iter().position(|meter| *meter == name);
        let slot = index.map(|index| u8::try_from(index).unwrap_or(u8::MAX).saturating_add(self.first_free));
        slot.filter(|slot| *slot < FILTER_SLOTS).unwrap_or(!0)
    }
}
