//! Inserts meters between a template's instructions: a meter behind each instruction that creates a
//! value charges the value to the rendering's budget.
//!
//! A meter is a filter that returns its input. Templates cannot write its name. The product of a
//! text or list with a number, and lists spread into arguments, are checked before they are
//! created.

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

use super::budget;

/// Behind instructions whose result has its items from existing values.
const TAKEN: &str = "<taken>";
/// Behind instructions whose result may be larger or deeper than their inputs.
const BUILT: &str = "<built>";
/// Like BUILT, behind sums of lists, which minijinja keeps lazy, and behind ranges.
const SUMMED: &str = "<summed>";
/// Before a value is stored in a namespace.
const KEPT: &str = "<kept>";
/// Before a product, applied to both factors.
const TIMES: &str = "<times>";
/// Before a slice whose step may be negative, applied to the value and the three numbers.
const BACKWARDS: &str = "<backwards>";
/// Before lists are spread into arguments, applied to all of them.
const SPREAD: &str = "<spread>";
/// At each iteration of a loop.
const TURN: &str = "<turn>";

/// Names of meters in the order of their slots in minijinja's cache of filters.
const METERS: [&str; 8] = [TAKEN, BUILT, SUMMED, KEPT, TIMES, BACKWARDS, SPREAD, TURN];
/// Size of minijinja's cache of filters per list of instructions.
const PLACES: u8 = 50;
/// Repeated template text is charged from this length on; shorter text is bounded by the steps.
const RAW_BYTES: usize = 24;
/// Maximum number of lists that one call spreads into its arguments.
const SPREADS_MAX: usize = 8;

/// Filters that return numbers or booleans.
const SCALAR: [&str; 7] = ["length", "count", "int", "float", "abs", "round", "bool"];
/// Filters whose result is a part of their input, or a text.
const PARTS: [&str; 30] = [
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
    env.add_filter(TAKEN, |value: ValueOrKwargs| taken(value.into_value()));
    env.add_filter(BUILT, |value: ValueOrKwargs| built(value.into_value()));
    env.add_filter(SUMMED, |value: ValueOrKwargs| summed(value.into_value()));
    env.add_filter(KEPT, |value: ValueOrKwargs| kept(value.into_value()));
    env.add_filter(TURN, |value: ValueOrKwargs| budget::step().map(|()| value.into_value()));
    env.add_filter(TIMES, |factors: Value| times(&factors));
    env.add_filter(BACKWARDS, |parts: Value| backwards(&parts));
    env.add_filter(SPREAD, |lists: Value| spread(&lists));
}

fn taken(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => budget::charge(value.as_str().unwrap_or_default().len())?,
        ValueKind::Iterable => return in_memory(&value),
        ValueKind::Seq | ValueKind::Map => budget::charge_items(value.len().unwrap_or_default())?,
        _ => budget::step()?,
    }
    Ok(value)
}

fn built(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Iterable => {
            let value = in_memory(&value)?;
            budget::charge_built(&value)?;
            Ok(value)
        }
        _ => summed(value),
    }
}

/// Charges a sum's content, including that of earlier sums.
pub(super) fn summed(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => budget::charge(value.as_str().unwrap_or_default().len())?,
        _ if budget::holds_values(&value) => budget::charge_built(&value)?,
        _ => budget::step()?,
    }
    Ok(value)
}

fn kept(value: Value) -> Result<Value, Error> {
    if budget::changes(&value) {
        return Err(budget::refuse("it puts a namespace or a loop into a namespace"));
    }
    if budget::holds_values(&value) {
        budget::charge_built(&value)?;
    }
    Ok(value)
}

/// Checks the size of a product, and returns its factors last one first, the order in which they
/// are unpacked.
fn times(factors: &Value) -> Result<Value, Error> {
    let (left, right) = (factors.get_item_by_index(0)?, factors.get_item_by_index(1)?);
    for (value, times) in [(&left, &right), (&right, &left)] {
        let Some(times) = times.as_usize() else { continue };
        if let Some(text) = value.as_str() {
            budget::foresee(text.len().saturating_mul(times))?;
        } else if budget::holds_values(value) {
            let weight = budget::weigh(value)?;
            budget::check_items(weight.values.saturating_mul(times))?;
            budget::foresee(weight.bytes.saturating_mul(times))?;
        }
    }
    Ok(Value::from(Tuple::from([right, left])))
}

/// The parts of a slice, last one first. minijinja panics on walking backwards through an empty
/// value, so an empty value is walked forwards.
fn backwards(parts: &Value) -> Result<Value, Error> {
    let mut all = parts.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    let empty = |value: &Value| value.try_iter().is_ok_and(|mut items| items.next().is_none());
    if let [value, _, _, step] = &mut all[..]
        && step.as_i64().is_some_and(|step| step < 0)
        && empty(value)
    {
        *step = Value::from(1);
    }
    all.reverse();
    Ok(Value::from(Tuple::from(all)))
}

/// The lists to spread into arguments, last one first.
fn spread(lists: &Value) -> Result<Value, Error> {
    let mut all = lists.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
    let items = all.iter().map(|list| list.len().unwrap_or_default());
    budget::charge_items(items.fold(0, usize::saturating_add))?;
    all.reverse();
    Ok(Value::from(Tuple::from(all)))
}

/// Materializes a lazily computed value: iterating over many nested lazy layers would need a stack
/// as deep as the layers. For templates the value stays the same, even its unknown length.
fn in_memory(value: &Value) -> Result<Value, Error> {
    let sized = value.len().is_some();
    let mut items = Vec::new();
    for item in value.try_iter()?.checked() {
        items.push(item?);
        budget::check_items(items.len())?;
    }
    budget::charge_items(items.len())?;
    Ok(if sized {
        Value::make_object_iterable(items, |items| Box::new(items.iter().cloned()))
    } else {
        Value::make_object_iterable(items, |items| {
            let mut items = items.iter();
            // Unlike the vector's iterator, this one has no known length.
            Box::new(std::iter::from_fn(move || items.next().cloned()))
        })
    })
}

/// The instructions with their meters; the error is one line. `repeats`: whether they may run more
/// than once.
pub(super) fn metered<'a>(plain: &Instructions<'a>, repeats: bool) -> Result<Instructions<'a>, String> {
    let all: Vec<&Instruction<'a>> = (0..).map_while(|at| plain.get(at)).collect();
    let places = Places::of(&all);
    let mut out = Vec::with_capacity(all.len() * 2);
    let mut starts = Vec::with_capacity(all.len() + 1);
    for at in 0..all.len() {
        starts.push(out.len() as u32);
        for written in with_meters(&all, at, repeats, &places)? {
            out.push((written, at as u32));
        }
    }
    starts.push(out.len() as u32);
    let mut metered = Instructions::new(plain.name(), plain.source());
    for (mut instruction, origin) in out {
        if let Some(target) = target(&mut instruction) {
            let moved = starts.get(*target as usize);
            *target = *moved.ok_or("its instructions jump nowhere")?;
        }
        match plain.get_span(origin) {
            Some(span) => metered.add_with_span(instruction, span),
            None => metered.add_with_line(instruction, plain.get_line(origin).unwrap_or_default() as u16),
        };
    }
    Ok(metered)
}

/// Whether a template with these instructions runs any of them more than once.
pub(super) fn repeats(plain: &Instructions) -> bool {
    (0..)
        .map_while(|at| plain.get(at))
        .any(|instruction| matches!(instruction, Instruction::Iterate(_) | Instruction::BuildMacro(..)))
}

/// The instruction at `at` with its meters.
fn with_meters<'a>(
    all: &[&Instruction<'a>],
    at: usize,
    repeats: bool,
    places: &Places,
) -> Result<Vec<Instruction<'a>>, String> {
    use Instruction::*;
    let itself = all[at].clone();
    let meter = |name: &'static str| ApplyFilter(name, Some(1), places.of_meter(name));
    let metered = |name: &'static str| vec![all[at].clone(), meter(name)];
    Ok(match all[at] {
        EmitRaw(raw) if repeats && raw.len() >= RAW_BYTES => vec![LoadConst(Value::from(*raw)), Emit],
        Slice if !steps_forwards(at.checked_sub(1).map(|before| all[before])) => {
            vec![
                BuildTuple(Some(4)),
                meter(BACKWARDS),
                UnpackList(4),
                itself,
                meter(TAKEN),
            ]
        }
        StringConcat | Slice | Add if is_charged_next(&all[at + 1..]) => vec![itself],
        StringConcat | Slice | EndCapture => metered(TAKEN),
        Add => metered(SUMMED),
        BuildList(_) | BuildTuple(_) | BuildMap(_) | CallMethod(..) | CallObject(_) => metered(BUILT),
        CallFunction("range", _) => metered(SUMMED),
        CallFunction(..) => metered(BUILT),
        ApplyFilter(name, ..) if SCALAR.contains(name) => vec![itself],
        ApplyFilter(name, ..) if PARTS.contains(name) => {
            if is_charged_next(&all[at + 1..]) {
                vec![itself]
            } else {
                metered(TAKEN)
            }
        }
        ApplyFilter(..) => metered(BUILT),
        // The two factors are packed into one value for the meter, and unpacked again.
        Mul => vec![BuildTuple(Some(2)), meter(TIMES), UnpackList(2), itself, meter(BUILT)],
        SetAttr(_) => vec![Swap, meter(KEPT), Swap, itself],
        Iterate(end) if looks_at_values(all.get(at..*end as usize).unwrap_or_default()) => metered(TURN),
        UnpackLists(lists) if *lists > SPREADS_MAX => {
            return Err(format!(
                "a call spreads more than {SPREADS_MAX} lists into its arguments"
            ));
        }
        UnpackLists(lists) => vec![BuildTuple(Some(*lists)), meter(SPREAD), UnpackList(*lists), itself],
        _ => vec![itself],
    })
}

/// Whether a slice's step, which is loaded last, is a constant that is not negative.
fn steps_forwards(step: Option<&Instruction>) -> bool {
    match step {
        Some(Instruction::LoadConst(step)) => step.is_none() || step.as_usize().is_some(),
        _ => false,
    }
}

/// Whether the following instructions charge the result: it is emitted at once, or concatenated
/// with a constant.
fn is_charged_next(behind: &[&Instruction]) -> bool {
    use Instruction::*;
    matches!(behind, [Emit, ..] | [LoadConst(_), Add | StringConcat, ..])
}

/// Whether an iteration of a loop with these instructions may take long without a meter.
/// Comparisons with constants and tests of a value's kind are short.
fn looks_at_values(body: &[&Instruction]) -> bool {
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
    let with_constant = |at: usize| at > 0 && matches!(body[at - 1], LoadConst(_));
    body.iter().enumerate().any(|(at, instruction)| match instruction {
        Eq | Ne | Gt | Gte | Lt | Lte => !with_constant(at),
        In | CompareAndPreserve(_) => true,
        PerformTest(name, ..) => !KINDS.contains(name),
        ApplyFilter(name, ..) => SCALAR.contains(name),
        _ => false,
    })
}

/// The jump target of an instruction.
fn target<'i>(instruction: &'i mut Instruction) -> Option<&'i mut u32> {
    use Instruction::*;
    match instruction {
        Jump(to) | JumpIfFalse(to) | JumpIfFalseOrPop(to) | JumpIfTrueOrPop(to) | Iterate(to) => Some(to),
        BuildMacro(_, to, _) => Some(to),
        _ => None,
    }
}

/// Slots in minijinja's cache of filters; the first slots belong to the template's own filters.
struct Places {
    free: u8,
}

impl Places {
    fn of(all: &[&Instruction]) -> Places {
        let taken = all.iter().filter_map(|instruction| match instruction {
            Instruction::ApplyFilter(_, _, place) if *place < PLACES => Some(place + 1),
            _ => None,
        });
        Places {
            free: taken.max().unwrap_or(0),
        }
    }

    /// The slot of a meter; `!0`: no slot, so the filter is looked up each time.
    fn of_meter(&self, name: &str) -> u8 {
        let at = METERS.iter().position(|meter| *meter == name);
        let place = at.map(|at| u8::try_from(at).unwrap_or(u8::MAX).saturating_add(self.free));
        place.filter(|place| *place < PLACES).unwrap_or(!0)
    }
}
