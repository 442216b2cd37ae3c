//! Finds the schemas within a JSON Schema, each with its location. Defines which keywords map names
//! to schemas, and which keywords hold data.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::engine::constraint::schema::resolve_ref;

/// Keywords whose values are data.
pub(super) const DATA_KEYWORDS: [&str; 4] = ["const", "enum", "default", "examples"];
/// Keywords whose values map names to schemas; such a name may equal a keyword.
pub(super) const SCHEMA_MAP_KEYWORDS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

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
    /// As the target of this `$ref`, which may be anywhere in the root schema.
    Reference(&'a str),
    /// In the value of `keyword` of the schema with index `parent`.
    Child {
        parent: usize,
        keyword: &'a str,
        segment: PathSegment<'a>,
    },
}

enum PathSegment<'a> {
    /// The schema is the keyword's value.
    KeywordValue,
    /// The schema has this name in the keyword's value.
    Name(&'a str),
    /// The schema has this index in the keyword's value.
    Item(usize),
}

impl<'a> SubSchemas<'a> {
    /// Finds each schema once, even if several `$ref`s name it.
    pub(super) fn of(root: &'a Value) -> SubSchemas<'a> {
        let mut found: Vec<SubSchema> = Vec::new();
        let mut seen: HashSet<*const Map<String, Value>> = HashSet::new();
        let mut to_visit = vec![(root, SchemaPath::Root)];
        while let Some((schema, path)) = to_visit.pop() {
            let Value::Object(members) = schema else {
                continue;
            };
            if !seen.insert(members) {
                continue;
            }
            let parent = found.len();
            let child_path = |keyword: &'a str, segment| SchemaPath::Child {
                parent,
                keyword,
                segment,
            };
            for (keyword, value) in members {
                match value {
                    _ if DATA_KEYWORDS.contains(&keyword.as_str()) => {}
                    Value::Object(named) if SCHEMA_MAP_KEYWORDS.contains(&keyword.as_str()) => {
                        let named = named.iter();
                        to_visit
                            .extend(named.map(|(name, schema)| (schema, child_path(keyword, PathSegment::Name(name)))));
                    }
                    Value::Array(items) => {
                        let items = items.iter().enumerate();
                        to_visit.extend(
                            items.map(|(index, schema)| (schema, child_path(keyword, PathSegment::Item(index)))),
                        );
                    }
                    Value::String(name) if keyword == "$ref" => {
                        to_visit.extend(resolve_ref(root, name).map(|schema| (schema, SchemaPath::Reference(name))));
                    }
                    value => to_visit.push((value, child_path(keyword, PathSegment::KeywordValue))),
                }
            }
            found.push(SubSchema { members, path });
        }
        SubSchemas(found)
    }

    /// The keywords of each schema, with the schema's index.
    pub(super) fn iter(&self) -> impl Iterator<Item = (usize, &'a Map<String, Value>)> {
        self.0.iter().map(|subschema| subschema.members).enumerate()
    }

    /// Location of the schema with this index, for a message: a JSON pointer, shortened.
    pub(super) fn json_pointer(&self, index: usize) -> String {
        let mut parts = Vec::new();
        let mut path = &self.0[index].path;
        loop {
            match path {
                SchemaPath::Root => break,
                SchemaPath::Reference(name) => {
                    parts.push(name.trim_start_matches("#/").to_string());
                    break;
                }
                SchemaPath::Child {
                    parent,
                    keyword,
                    segment,
                } => {
                    match segment {
                        PathSegment::KeywordValue => {}
                        PathSegment::Name(name) => parts.push(name.replace('~', "~0").replace('/', "~1")),
                        PathSegment::Item(index) => parts.push(index.to_string()),
                    }
                    parts.push(keyword.replace('~', "~0").replace('/', "~1"));
                    path = &self.0[*parent].path;
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
