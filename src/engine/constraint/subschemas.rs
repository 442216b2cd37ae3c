//! Finds the schemas within a JSON Schema, each with its location. Defines which keywords hold
//! schemas by name, and which hold data.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::engine::constraint::schema::target;

/// Keywords whose values are data.
pub(super) const DATA: [&str; 4] = ["const", "enum", "default", "examples"];
/// Keywords whose values map names to schemas; such a name may equal a keyword.
pub(super) const BY_NAME: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Maximum characters of a pointer in a message.
const POINTER_CHARS_MAX: usize = 120;

/// All schemas within a schema, the outermost first.
pub(super) struct SubSchemas<'a>(Vec<SubSchema<'a>>);

/// A schema and its location.
struct SubSchema<'a> {
    members: &'a Map<String, Value>,
    path: SchemaPath<'a>,
}

/// How a schema is reached.
enum SchemaPath<'a> {
    Root,
    /// By a `$ref` with this target, which may be anywhere in the schema.
    Named(&'a str),
    /// In the value of a keyword of the schema with number `parent`.
    Below {
        parent: usize,
        keyword: &'a str,
        segment: PathSegment<'a>,
    },
}

enum PathSegment<'a> {
    Itself,
    Name(&'a str),
    Item(usize),
}

impl<'a> SubSchemas<'a> {
    /// Finds each schema once, however many `$ref`s name it.
    pub(super) fn of(root: &'a Value) -> SubSchemas<'a> {
        let mut found: Vec<SubSchema> = Vec::new();
        let mut seen: HashSet<*const Map<String, Value>> = HashSet::new();
        let mut open = vec![(root, SchemaPath::Root)];
        while let Some((schema, path)) = open.pop() {
            let Value::Object(members) = schema else {
                continue;
            };
            if !seen.insert(members) {
                continue;
            }
            let parent = found.len();
            let below = |keyword: &'a str, segment| SchemaPath::Below {
                parent,
                keyword,
                segment,
            };
            for (keyword, value) in members {
                match value {
                    _ if DATA.contains(&keyword.as_str()) => {}
                    Value::Object(named) if BY_NAME.contains(&keyword.as_str()) => {
                        let named = named.iter();
                        open.extend(named.map(|(name, schema)| (schema, below(keyword, PathSegment::Name(name)))));
                    }
                    Value::Array(items) => {
                        let items = items.iter().enumerate();
                        open.extend(items.map(|(at, schema)| (schema, below(keyword, PathSegment::Item(at)))));
                    }
                    Value::String(name) if keyword == "$ref" => {
                        open.extend(target(root, name).map(|schema| (schema, SchemaPath::Named(name))));
                    }
                    value => open.push((value, below(keyword, PathSegment::Itself))),
                }
            }
            found.push(SubSchema { members, path });
        }
        SubSchemas(found)
    }

    /// The keywords of each schema, with the schema's number.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &'a Map<String, Value>)> {
        self.0.iter().map(|subschema| subschema.members).enumerate()
    }

    /// Location of the schema with this number, for a message: a JSON pointer, shortened.
    pub(super) fn json_pointer(&self, number: usize) -> String {
        let mut parts = Vec::new();
        let mut at = &self.0[number].path;
        loop {
            match at {
                SchemaPath::Root => break,
                SchemaPath::Named(name) => {
                    parts.push(name.trim_start_matches("#/").to_string());
                    break;
                }
                SchemaPath::Below {
                    parent,
                    keyword,
                    segment,
                } => {
                    match segment {
                        PathSegment::Itself => {}
                        PathSegment::Name(name) => parts.push(name.replace('~', "~0").replace('/', "~1")),
                        PathSegment::Item(at) => parts.push(at.to_string()),
                    }
                    parts.push(keyword.replace('~', "~0").replace('/', "~1"));
                    at = &self.0[*parent].path;
                }
            }
        }
        if parts.is_empty() {
            return "its root".into();
        }
        parts.reverse();
        let pointer = format!("/{}", parts.join("/"));
        match pointer.char_indices().nth(POINTER_CHARS_MAX) {
            Some((end, _)) => format!("`{}…`", &pointer[..end]),
            None => format!("`{pointer}`"),
        }
    }
}
