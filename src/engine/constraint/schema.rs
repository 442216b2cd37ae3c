//! Checks what a JSON Schema costs to compile, before it is compiled.
//!
//! Some bounds are local: levels, properties of an object, alternatives, expressions. The rest is
//! [`CostEstimator`]: llguidance inlines the target of a `$ref` that has other keywords beside it, and
//! multiplies alternatives that must hold together. So a schema of a kilobyte can become gigabytes.
//! `CostEstimator` follows the same steps, counts where llguidance copies, and refuses the schema once the
//! count exceeds the bound.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::engine::constraint::numbers::check_numbers;
use crate::engine::constraint::subschemas::SubSchemas;
use crate::engine::constraint::{ConstraintError, pattern};

const FIELD: &str = "json_schema";

/// Maximum bytes of a schema, as compact JSON.
pub(super) const BYTES_MAX: usize = 1 << 20;
/// Maximum nesting of a schema.
pub(super) const LEVELS_MAX: usize = 100;
/// Maximum sum of the levels of all targets of `$ref`s: a chain of definitions is compiled by
/// recursion.
pub(super) const REFERRED_LEVELS_MAX: usize = 3_000;
/// Maximum values visited to count those levels.
const REFERRED_VALUES_MAX: usize = 2_000_000;
/// Maximum nesting after definitions are inlined.
const PLACED_LEVELS_MAX: usize = 300;
/// Maximum properties of one object.
pub(super) const PROPERTIES_MAX: usize = 2_000;
/// Maximum properties of an object with `minProperties` or `maxProperties`: each possible number of
/// properties is a grammar of its own.
pub(super) const COUNTED_PROPERTIES_MAX: usize = 100;
/// Maximum `patternProperties` of one object: each is compared with each.
pub(super) const PATTERN_PROPERTIES_MAX: usize = 64;
/// Maximum entries of `enum`, `anyOf`, `oneOf`, `allOf`, `prefixItems` and the like.
pub(super) const ALTERNATIVES_MAX: usize = 10_000;
/// Maximum work. The unit is about one byte of the compiled schema; 16 MiB take half a second to
/// compile.
pub(super) const WORK_MAX: u64 = 64 << 20;
/// Work of an empty schema.
const NODE: u64 = 256;

/// Keywords without effect on the answer.
const NOTES: [&str; 15] = [
    "$anchor",
    "$defs",
    "definitions",
    "$schema",
    "$id",
    "id",
    "$comment",
    "title",
    "description",
    "default",
    "readOnly",
    "writeOnly",
    "examples",
    "contentMediaType",
    "contentEncoding",
];

/// Checks the size and nesting of a schema, and returns it as text.
///
/// # Errors
/// The schema exceeds a bound.
pub(super) fn checked(schema: &Value) -> Result<String, ConstraintError> {
    let mut left = usize::MAX;
    bound(levels(schema, &mut left), LEVELS_MAX, "levels")?;
    let text = schema.to_string();
    bound(text.len(), BYTES_MAX, "bytes")?;
    Ok(text)
}

/// Checks the bounds that take long to check; called on the thread that compiles the schema.
///
/// Returns the schema's work, which is about its bytes once it is compiled.
///
/// # Errors
/// The schema exceeds a bound.
pub(super) fn check_work(schema: &Value) -> Result<u64, ConstraintError> {
    check_places(schema)?;
    check_references(schema)?;
    let mut estimator = CostEstimator {
        root: schema,
        left: WORK_MAX,
        named: HashSet::new(),
        to_do: Vec::new(),
    };
    estimator.intersect(vec![Requirement::Schema(schema)], 0)?;
    while let Some(target) = estimator.to_do.pop() {
        estimator.intersect(vec![Requirement::Schema(target)], 0)?;
    }
    Ok(WORK_MAX - estimator.left)
}

fn too_large(size: usize, limit: usize, unit: &'static str) -> ConstraintError {
    ConstraintError::TooLarge {
        field: FIELD,
        size,
        unit,
        limit,
    }
}

fn bound(size: usize, limit: usize, unit: &'static str) -> Result<(), ConstraintError> {
    if size > limit {
        Err(too_large(size, limit, unit))
    } else {
        Ok(())
    }
}

/// Levels of nesting, computed without recursion. `left` is decremented per value, and the walk
/// stops once it is 0.
fn levels(value: &Value, left: &mut usize) -> usize {
    let mut deepest = 0;
    let mut stack = vec![(value, 1)];
    while let Some((value, depth)) = stack.pop() {
        *left = left.saturating_sub(1);
        if *left == 0 {
            break;
        }
        deepest = deepest.max(depth);
        match value {
            Value::Array(items) => stack.extend(items.iter().map(|v| (v, depth + 1))),
            Value::Object(members) => stack.extend(members.values().map(|v| (v, depth + 1))),
            _ => {}
        }
    }
    deepest
}

/// Checks the local bounds of every schema within `schema`.
fn check_places(schema: &Value) -> Result<(), ConstraintError> {
    let subschemas = SubSchemas::of(schema);
    for (number, members) in subschemas.iter() {
        check_numbers(members).map_err(|why| ConstraintError::Invalid {
            field: FIELD,
            why: format!("at {}, {why}", subschemas.json_pointer(number)),
        })?;
        members.iter().try_for_each(|(name, value)| check_place(name, value))?;
    }
    Ok(())
}

fn check_place(name: &str, value: &Value) -> Result<(), ConstraintError> {
    match (name, value) {
        ("properties", Value::Object(of)) => bound(of.len(), PROPERTIES_MAX, "properties of one object"),
        ("required", Value::Array(of)) => bound(of.len(), PROPERTIES_MAX, "required properties of one object"),
        ("patternProperties", Value::Object(of)) => {
            bound(of.len(), PATTERN_PROPERTIES_MAX, "`patternProperties` of one object")?;
            of.keys().try_for_each(|key| pattern::cost(FIELD, key).map(drop))
        }
        ("pattern", Value::String(text)) => pattern::cost(FIELD, text).map(drop),
        ("x-guidance", Value::Object(options)) => {
            let texts = options.values().filter_map(Value::as_str);
            texts
                .map(|text| pattern::cost(FIELD, text))
                .try_for_each(|cost| cost.map(drop))
        }
        ("enum" | "anyOf" | "oneOf" | "allOf" | "prefixItems" | "items" | "type", Value::Array(of)) => {
            bound(of.len(), ALTERNATIVES_MAX, "entries of one `enum`, `anyOf` or the like")
        }
        _ => Ok(()),
    }
}

/// Checks how deep a chain of definitions can become.
fn check_references(schema: &Value) -> Result<(), ConstraintError> {
    let mut seen: HashSet<&str> = HashSet::new();
    let (mut sum, mut left) = (0, REFERRED_VALUES_MAX);
    let mut stack = vec![schema];
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(members) => {
                stack.extend(members.values());
                if let Some(Value::String(name)) = members.get("$ref")
                    && seen.insert(name)
                    && let Some(target) = target(schema, name)
                {
                    sum += levels(target, &mut left);
                    if left == 0 {
                        sum = sum.max(REFERRED_LEVELS_MAX + 1);
                    }
                    bound(sum, REFERRED_LEVELS_MAX, "levels of nested `$ref` definitions")?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The target of a `$ref`, resolved as llguidance resolves it.
pub(super) fn target<'a>(root: &'a Value, name: &str) -> Option<&'a Value> {
    if name == "#" || name == "#/" {
        return Some(root);
    }
    let mut at = root;
    for segment in name.strip_prefix("#/")?.split('/') {
        at = match at {
            Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
            other => other.get(segment)?,
        };
    }
    Some(at)
}

/// A requirement that must hold together with others.
#[derive(Clone)]
enum Requirement<'a> {
    Schema(&'a Value),
    /// A schema's own keywords, apart from `$ref`, `allOf`, `anyOf`, `oneOf`, `enum` and `const`.
    Own(&'a Map<String, Value>),
    /// At least one of these schemas.
    AnyOf(&'a [Value]),
    Enum(&'a [Value]),
    Const(&'a Value),
}

/// Counts the compiler's work on a schema.
struct CostEstimator<'a> {
    root: &'a Value,
    left: u64,
    /// The `$ref`s whose targets are compiled once, on their own.
    named: HashSet<&'a str>,
    to_do: Vec<&'a Value>,
}

impl<'a> CostEstimator<'a> {
    fn charge(&mut self, cost: u64) -> Result<(), ConstraintError> {
        match self.left.checked_sub(cost) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => Err(ConstraintError::Work { field: FIELD }),
        }
    }

    /// Counts the work of schemas that must hold together.
    fn intersect(&mut self, items: Vec<Requirement<'a>>, depth: usize) -> Result<(), ConstraintError> {
        bound(depth, PLACED_LEVELS_MAX, "levels after `$ref`s are expanded")?;
        let mut flat = Vec::new();
        let mut references = Vec::new();
        let mut stack = items;
        loop {
            while let Some(item) = stack.pop() {
                self.charge(NODE)?;
                self.flatten(item, &mut stack, &mut flat, &mut references)?;
            }
            // A `$ref` without keywords beside it is compiled once, wherever it is named.
            if let ([name], true) = (&references[..], flat.is_empty()) {
                if let (true, Some(target)) = (self.named.insert(name), target(self.root, name)) {
                    self.to_do.push(target);
                }
                return Ok(());
            }
            match references.pop() {
                Some(name) => stack.extend(target(self.root, name).map(Requirement::Schema)),
                None => break,
            }
        }
        let choice = flat
            .iter()
            .position(|item| matches!(item, Requirement::AnyOf(_) | Requirement::Enum(_)));
        let Some(choice) = choice else {
            return self.intersect_leaf(&flat, depth);
        };
        let (options, is_enum) = match flat.swap_remove(choice) {
            Requirement::Enum(values) => (values, true),
            Requirement::AnyOf(options) => (options, false),
            _ => (&[][..], false),
        };
        for option in options {
            let mut with = flat.clone();
            with.push(if is_enum {
                Requirement::Const(option)
            } else {
                Requirement::Schema(option)
            });
            self.intersect(with, depth + 1)?;
        }
        Ok(())
    }

    /// Splits a schema into its own requirements (`flat`), the `$ref`s that it names (`references`)
    /// and schemas that are still to be split (`stack`).
    fn flatten(
        &mut self,
        item: Requirement<'a>,
        stack: &mut Vec<Requirement<'a>>,
        flat: &mut Vec<Requirement<'a>>,
        references: &mut Vec<&'a str>,
    ) -> Result<(), ConstraintError> {
        let Requirement::Schema(schema) = item else {
            flat.push(item);
            return Ok(());
        };
        let Value::Object(members) = schema else {
            return Ok(());
        };
        let mut owns = false;
        for (name, value) in members {
            match (name.as_str(), value) {
                ("$ref", Value::String(name)) => references.push(name),
                ("allOf", Value::Array(of)) => stack.extend(of.iter().map(Requirement::Schema)),
                ("anyOf", Value::Array(of)) => flat.push(Requirement::AnyOf(of)),
                ("oneOf", Value::Array(of)) => {
                    self.charge(compared(of))?;
                    flat.push(Requirement::AnyOf(of));
                }
                ("enum", Value::Array(of)) => flat.push(Requirement::Enum(of)),
                ("const", value) => flat.push(Requirement::Const(value)),
                ("x-guidance", _) => {}
                (name, _) => owns |= !NOTES.contains(&name),
            }
        }
        if owns {
            flat.push(Requirement::Own(members));
        }
        Ok(())
    }

    /// Counts schemas that must hold together and that leave no alternatives.
    fn intersect_leaf(&mut self, items: &[Requirement<'a>], depth: usize) -> Result<(), ConstraintError> {
        let mut own: Vec<&'a Map<String, Value>> = Vec::new();
        for item in items {
            match item {
                Requirement::Own(members) => own.push(members),
                Requirement::Const(value) => self.charge(size(value))?,
                _ => {}
            }
        }
        for members in &own {
            if let Some(Value::String(text)) = members.get("pattern") {
                self.charge(pattern::cost(FIELD, text)?)?;
            }
        }
        if own.is_empty() {
            return Ok(());
        }
        self.meet_properties(&own, depth)?;
        self.meet_items(&own, depth)
    }

    fn meet_properties(&mut self, own: &[&'a Map<String, Value>], depth: usize) -> Result<(), ConstraintError> {
        let object = |members: &'a Map<String, Value>, name: &str| members.get(name).and_then(Value::as_object);
        let mut names: HashSet<&str> = HashSet::new();
        let mut in_order: Vec<&'a str> = Vec::new();
        let mut patterns = 0;
        for members in own {
            let properties = object(members, "properties").into_iter().flat_map(|of| of.keys());
            let required = members.get("required").and_then(Value::as_array).into_iter().flatten();
            let all = properties.map(String::as_str).chain(required.filter_map(Value::as_str));
            in_order.extend(all.filter(|name| names.insert(name)));
            for (key, _) in object(members, "patternProperties").into_iter().flatten() {
                patterns += 16 + pattern::cost(FIELD, key)? / 64;
            }
        }
        let count = in_order.len();
        bound(count, PROPERTIES_MAX, "properties of one object")?;
        if own
            .iter()
            .any(|of| of.contains_key("minProperties") || of.contains_key("maxProperties"))
        {
            bound(
                count,
                COUNTED_PROPERTIES_MAX,
                "properties of an object with `minProperties` or `maxProperties`",
            )?;
            self.charge(8 * (count as u64).pow(3))?;
        }
        self.charge(4 * (count as u64).pow(2) + 8 * (count * own.len()) as u64 + 16 * patterns * patterns)?;
        // A property must satisfy every schema that the objects have for it.
        for name in in_order {
            let of = own.iter().filter_map(|members| {
                let named = object(members, "properties").and_then(|of| of.get(name));
                named.or_else(|| members.get("additionalProperties"))
            });
            let of: Vec<Requirement> = of.map(Requirement::Schema).collect();
            // It must also satisfy the schema of a `patternProperties` entry whose pattern matches
            // its name.
            for schema in own
                .iter()
                .filter_map(|of| object(of, "patternProperties"))
                .flat_map(Map::values)
            {
                let with = of.iter().cloned().chain([Requirement::Schema(schema)]);
                self.intersect(with.collect(), depth + 1)?;
            }
            self.intersect(of, depth + 1)?;
        }
        let others = own.iter().filter_map(|members| members.get("additionalProperties"));
        self.intersect(others.map(Requirement::Schema).collect(), depth + 1)?;
        for members in own {
            for (_, schema) in object(members, "patternProperties").into_iter().flatten() {
                let mut of = vec![Requirement::Schema(schema)];
                let others = own.iter().filter_map(|members| members.get("additionalProperties"));
                of.extend(others.map(Requirement::Schema));
                self.intersect(of, depth + 1)?;
            }
        }
        Ok(())
    }

    fn meet_items(&mut self, own: &[&'a Map<String, Value>], depth: usize) -> Result<(), ConstraintError> {
        let first = |members: &'a Map<String, Value>| -> &'a [Value] {
            let lists = ["prefixItems", "items"].map(|name| members.get(name).and_then(Value::as_array));
            lists.into_iter().flatten().next().map_or(&[], Vec::as_slice)
        };
        let rest = |members: &'a Map<String, Value>| {
            let all = members.get("items").filter(|items| !items.is_array());
            all.or_else(|| members.get("additionalItems"))
        };
        let longest = own.iter().map(|of| first(of).len()).max().unwrap_or(0);
        for at in 0..longest {
            let of = own.iter().filter_map(|of| first(of).get(at).or_else(|| rest(of)));
            self.intersect(of.map(Requirement::Schema).collect(), depth + 1)?;
        }
        let of: Vec<Requirement> = own.iter().filter_map(|of| rest(of)).map(Requirement::Schema).collect();
        if of.is_empty() {
            Ok(())
        } else {
            self.intersect(of, depth + 1)
        }
    }
}

/// Work of comparing each schema of a `oneOf` with each other.
fn compared(options: &[Value]) -> u64 {
    let required = |option: &Value| option.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    let most = options.iter().map(required).max().unwrap_or(0);
    4 * (options.len() as u64).pow(2) * (1 + most as u64)
}

/// Work of a constant value, computed without recursion.
fn size(value: &Value) -> u64 {
    let mut sum = 0;
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        sum += NODE;
        match value {
            Value::String(text) => sum += 8 * text.len() as u64,
            Value::Array(items) => stack.extend(items),
            Value::Object(members) => {
                sum += 4 * (members.len() as u64).pow(2) + members.keys().map(|key| key.len() as u64).sum::<u64>();
                stack.extend(members.values());
            }
            _ => {}
        }
    }
    sum
}
