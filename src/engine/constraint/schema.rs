//! Estimates the cost of compiling a JSON Schema, before it is compiled.
//!
//! Some bounds are local: levels, properties of an object, alternatives, expressions. The other
//! bounds need [`CostEstimator`]: llguidance inlines the target of a `$ref` that has other keywords
//! beside it, and multiplies alternatives that must hold together. So a schema of a kilobyte can
//! become gigabytes. `CostEstimator` follows llguidance's steps, counts its copies, and refuses the
//! schema once the count exceeds the bound.

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
/// Maximum sum of the levels of all targets of `$ref`s, since a chain of definitions is compiled
/// by recursion.
pub(super) const REFERRED_LEVELS_MAX: usize = 3_000;
/// Maximum number of values visited to count those levels.
const REFERRED_VALUES_MAX: usize = 2_000_000;
/// Maximum nesting after `$ref`s are expanded.
const EXPANDED_LEVELS_MAX: usize = 300;
/// Maximum properties of one object.
pub(super) const PROPERTIES_MAX: usize = 2_000;
/// Maximum properties of an object with `minProperties` or `maxProperties`, where each possible
/// number of properties needs a grammar of its own.
pub(super) const COUNTED_PROPERTIES_MAX: usize = 100;
/// Maximum `patternProperties` of one object, each of which is compared with all others.
pub(super) const PATTERN_PROPERTIES_MAX: usize = 64;
/// Maximum entries of `enum`, `anyOf`, `oneOf`, `allOf`, `prefixItems` and the like.
pub(super) const ALTERNATIVES_MAX: usize = 10_000;
/// Maximum work. Its unit is about one byte of the compiled schema; 16 MiB take half a second to
/// compile.
pub(super) const WORK_MAX: u64 = 64 << 20;
/// Work of an empty schema.
const NODE_WORK: u64 = 256;

/// Annotations: keywords without effect on the answer.
const ANNOTATIONS: [&str; 15] = [
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
pub(super) fn check_text(schema: &Value) -> Result<String, ConstraintError> {
    let mut values_left = usize::MAX;
    check_max(levels(schema, &mut values_left), LEVELS_MAX, "levels")?;
    let text = schema.to_string();
    check_max(text.len(), BYTES_MAX, "bytes")?;
    Ok(text)
}

/// Checks the bounds that take long to check. Called on the thread that compiles the schema.
///
/// Returns the schema's work, which approximates the bytes of the compiled schema.
///
/// # Errors
/// The schema exceeds a bound.
pub(super) fn check_work(schema: &Value) -> Result<u64, ConstraintError> {
    check_subschemas(schema)?;
    check_references(schema)?;
    let mut estimator = CostEstimator {
        root: schema,
        work_left: WORK_MAX,
        compiled_refs: HashSet::new(),
        pending_targets: Vec::new(),
    };
    estimator.intersect(vec![Requirement::Schema(schema)], 0)?;
    while let Some(target) = estimator.pending_targets.pop() {
        estimator.intersect(vec![Requirement::Schema(target)], 0)?;
    }
    Ok(WORK_MAX - estimator.work_left)
}

fn too_large(size: usize, limit: usize, unit: &'static str) -> ConstraintError {
    ConstraintError::TooLarge {
        field: FIELD,
        size,
        unit,
        limit,
    }
}

fn check_max(size: usize, limit: usize, unit: &'static str) -> Result<(), ConstraintError> {
    if size > limit {
        Err(too_large(size, limit, unit))
    } else {
        Ok(())
    }
}

/// Levels of nesting, computed without recursion. `values_left` is decremented per value, and the
/// walk stops once it is 0.
fn levels(value: &Value, values_left: &mut usize) -> usize {
    let mut deepest = 0;
    let mut stack = vec![(value, 1)];
    while let Some((value, depth)) = stack.pop() {
        *values_left = values_left.saturating_sub(1);
        if *values_left == 0 {
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
fn check_subschemas(schema: &Value) -> Result<(), ConstraintError> {
    let subschemas = SubSchemas::of(schema);
    for (index, members) in subschemas.iter() {
        check_numbers(members).map_err(|why| ConstraintError::Invalid {
            field: FIELD,
            why: format!("at {}, {why}", subschemas.json_pointer(index)),
        })?;
        members
            .iter()
            .try_for_each(|(name, value)| check_keyword(name, value))?;
    }
    Ok(())
}

fn check_keyword(name: &str, value: &Value) -> Result<(), ConstraintError> {
    match (name, value) {
        ("properties", Value::Object(entries)) => check_max(entries.len(), PROPERTIES_MAX, "properties of one object"),
        ("required", Value::Array(entries)) => {
            check_max(entries.len(), PROPERTIES_MAX, "required properties of one object")
        }
        ("patternProperties", Value::Object(entries)) => {
            check_max(
                entries.len(),
                PATTERN_PROPERTIES_MAX,
                "`patternProperties` of one object",
            )?;
            entries
                .keys()
                .try_for_each(|key| pattern::compile_cost(FIELD, key).map(drop))
        }
        ("pattern", Value::String(text)) => pattern::compile_cost(FIELD, text).map(drop),
        ("x-guidance", Value::Object(options)) => {
            let texts = options.values().filter_map(Value::as_str);
            texts
                .map(|text| pattern::compile_cost(FIELD, text))
                .try_for_each(|cost| cost.map(drop))
        }
        ("enum" | "anyOf" | "oneOf" | "allOf" | "prefixItems" | "items" | "type", Value::Array(entries)) => check_max(
            entries.len(),
            ALTERNATIVES_MAX,
            "entries of one `enum`, `anyOf` or the like",
        ),
        _ => Ok(()),
    }
}

/// Checks the maximum depth of a chain of definitions.
fn check_references(schema: &Value) -> Result<(), ConstraintError> {
    let mut seen: HashSet<&str> = HashSet::new();
    let (mut sum, mut values_left) = (0, REFERRED_VALUES_MAX);
    let mut stack = vec![schema];
    while let Some(value) = stack.pop() {
        match value {
            Value::Array(items) => stack.extend(items),
            Value::Object(members) => {
                stack.extend(members.values());
                if let Some(Value::String(name)) = members.get("$ref")
                    && seen.insert(name)
                    && let Some(target) = resolve_ref(schema, name)
                {
                    sum += levels(target, &mut values_left);
                    if values_left == 0 {
                        sum = sum.max(REFERRED_LEVELS_MAX + 1);
                    }
                    check_max(sum, REFERRED_LEVELS_MAX, "levels of nested `$ref` definitions")?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// The target of a `$ref`, resolved as llguidance resolves it.
pub(super) fn resolve_ref<'a>(root: &'a Value, name: &str) -> Option<&'a Value> {
    if name == "#" || name == "#/" {
        return Some(root);
    }
    let mut value = root;
    for segment in name.strip_prefix("#/")?.split('/') {
        value = match value {
            Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
            other => other.get(segment)?,
        };
    }
    Some(value)
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

/// Estimates the compiler's work on a schema.
struct CostEstimator<'a> {
    root: &'a Value,
    work_left: u64,
    /// `$ref`s whose targets are compiled once, on their own.
    compiled_refs: HashSet<&'a str>,
    pending_targets: Vec<&'a Value>,
}

impl<'a> CostEstimator<'a> {
    fn charge(&mut self, cost: u64) -> Result<(), ConstraintError> {
        match self.work_left.checked_sub(cost) {
            Some(left) => {
                self.work_left = left;
                Ok(())
            }
            None => Err(ConstraintError::TooMuchWork { field: FIELD }),
        }
    }

    /// Counts the work of schemas that must hold together.
    fn intersect(&mut self, items: Vec<Requirement<'a>>, depth: usize) -> Result<(), ConstraintError> {
        check_max(depth, EXPANDED_LEVELS_MAX, "levels after `$ref`s are expanded")?;
        let mut flat = Vec::new();
        let mut references = Vec::new();
        let mut stack = items;
        loop {
            while let Some(item) = stack.pop() {
                self.charge(NODE_WORK)?;
                self.flatten(item, &mut stack, &mut flat, &mut references)?;
            }
            // The target of a `$ref` without other keywords is compiled only once.
            if let ([name], true) = (&references[..], flat.is_empty()) {
                if let (true, Some(target)) = (self.compiled_refs.insert(name), resolve_ref(self.root, name)) {
                    self.pending_targets.push(target);
                }
                return Ok(());
            }
            match references.pop() {
                Some(name) => stack.extend(resolve_ref(self.root, name).map(Requirement::Schema)),
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
            let mut requirements = flat.clone();
            requirements.push(if is_enum {
                Requirement::Const(option)
            } else {
                Requirement::Schema(option)
            });
            self.intersect(requirements, depth + 1)?;
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
        let mut has_own = false;
        for (name, value) in members {
            match (name.as_str(), value) {
                ("$ref", Value::String(name)) => references.push(name),
                ("allOf", Value::Array(entries)) => stack.extend(entries.iter().map(Requirement::Schema)),
                ("anyOf", Value::Array(entries)) => flat.push(Requirement::AnyOf(entries)),
                ("oneOf", Value::Array(entries)) => {
                    self.charge(comparison_work(entries))?;
                    flat.push(Requirement::AnyOf(entries));
                }
                ("enum", Value::Array(entries)) => flat.push(Requirement::Enum(entries)),
                ("const", value) => flat.push(Requirement::Const(value)),
                ("x-guidance", _) => {}
                (name, _) => has_own |= !ANNOTATIONS.contains(&name),
            }
        }
        if has_own {
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
                Requirement::Const(value) => self.charge(constant_work(value))?,
                _ => {}
            }
        }
        for members in &own {
            if let Some(Value::String(text)) = members.get("pattern") {
                self.charge(pattern::compile_cost(FIELD, text)?)?;
            }
        }
        if own.is_empty() {
            return Ok(());
        }
        self.intersect_properties(&own, depth)?;
        self.intersect_items(&own, depth)
    }

    fn intersect_properties(&mut self, own: &[&'a Map<String, Value>], depth: usize) -> Result<(), ConstraintError> {
        let object = |members: &'a Map<String, Value>, name: &str| members.get(name).and_then(Value::as_object);
        let mut seen: HashSet<&str> = HashSet::new();
        let mut property_names: Vec<&'a str> = Vec::new();
        let mut patterns = 0;
        for members in own {
            let properties = object(members, "properties").into_iter().flat_map(|named| named.keys());
            let required = members.get("required").and_then(Value::as_array).into_iter().flatten();
            let all = properties.map(String::as_str).chain(required.filter_map(Value::as_str));
            property_names.extend(all.filter(|name| seen.insert(name)));
            for (key, _) in object(members, "patternProperties").into_iter().flatten() {
                patterns += 16 + pattern::compile_cost(FIELD, key)? / 64;
            }
        }
        let count = property_names.len();
        check_max(count, PROPERTIES_MAX, "properties of one object")?;
        if own
            .iter()
            .any(|members| members.contains_key("minProperties") || members.contains_key("maxProperties"))
        {
            check_max(
                count,
                COUNTED_PROPERTIES_MAX,
                "properties of an object with `minProperties` or `maxProperties`",
            )?;
            self.charge(8 * (count as u64).pow(3))?;
        }
        self.charge(4 * (count as u64).pow(2) + 8 * (count * own.len()) as u64 + 16 * patterns * patterns)?;
        // A property must satisfy every schema that the objects have for it.
        for name in property_names {
            let schemas = own.iter().filter_map(|members| {
                let named = object(members, "properties").and_then(|properties| properties.get(name));
                named.or_else(|| members.get("additionalProperties"))
            });
            let requirements: Vec<Requirement> = schemas.map(Requirement::Schema).collect();
            // It must also satisfy the schema of a `patternProperties` entry whose pattern matches
            // its name.
            for schema in own
                .iter()
                .filter_map(|members| object(members, "patternProperties"))
                .flat_map(Map::values)
            {
                let with_pattern = requirements.iter().cloned().chain([Requirement::Schema(schema)]);
                self.intersect(with_pattern.collect(), depth + 1)?;
            }
            self.intersect(requirements, depth + 1)?;
        }
        let others = own.iter().filter_map(|members| members.get("additionalProperties"));
        self.intersect(others.map(Requirement::Schema).collect(), depth + 1)?;
        for members in own {
            for (_, schema) in object(members, "patternProperties").into_iter().flatten() {
                let mut requirements = vec![Requirement::Schema(schema)];
                let others = own.iter().filter_map(|members| members.get("additionalProperties"));
                requirements.extend(others.map(Requirement::Schema));
                self.intersect(requirements, depth + 1)?;
            }
        }
        Ok(())
    }

    fn intersect_items(&mut self, own: &[&'a Map<String, Value>], depth: usize) -> Result<(), ConstraintError> {
        let first = |members: &'a Map<String, Value>| -> &'a [Value] {
            let lists = ["prefixItems", "items"].map(|name| members.get(name).and_then(Value::as_array));
            lists.into_iter().flatten().next().map_or(&[], Vec::as_slice)
        };
        let rest = |members: &'a Map<String, Value>| {
            let items = members.get("items").filter(|items| !items.is_array());
            items.or_else(|| members.get("additionalItems"))
        };
        let longest = own.iter().map(|members| first(members).len()).max().unwrap_or(0);
        for index in 0..longest {
            let schemas = own
                .iter()
                .filter_map(|members| first(members).get(index).or_else(|| rest(members)));
            self.intersect(schemas.map(Requirement::Schema).collect(), depth + 1)?;
        }
        let schemas = own.iter().filter_map(|members| rest(members));
        let requirements: Vec<Requirement> = schemas.map(Requirement::Schema).collect();
        if requirements.is_empty() {
            Ok(())
        } else {
            self.intersect(requirements, depth + 1)
        }
    }
}

/// Work of comparing all schemas of a `oneOf` with each other.
fn comparison_work(options: &[Value]) -> u64 {
    let required = |option: &Value| option.get("required").and_then(Value::as_array).map_or(0, Vec::len);
    let max_required = options.iter().map(required).max().unwrap_or(0);
    4 * (options.len() as u64).pow(2) * (1 + max_required as u64)
}

/// Work of a constant value, computed without recursion.
fn constant_work(value: &Value) -> u64 {
    let mut sum = 0;
    let mut stack = vec![value];
    while let Some(value) = stack.pop() {
        sum += NODE_WORK;
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
