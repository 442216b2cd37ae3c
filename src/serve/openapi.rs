//! The OpenAPI 3.1 document of the service, at `/openapi.json`. Its schemas are made from the types
//! that requests are read into and responses are written from.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

use super::batches::{self, BatchRequest};
use super::files;
use super::id;
use super::request::{EXPIRY_SECONDS_MAX, EXPIRY_SECONDS_MIN, PageSize};
use super::uploads::{CompleteRequest, PartView, UploadRequest, UploadView};
use super::view::{BatchView, DeletedView, ErrorView, FileView, ListView, ModelView};
use crate::dashboard::{ExtendRequest, JobList, JobView, PAGE_MAX, ROWS_MAX, RowList};

/// The endpoint of downloads.
const CONTENT: &str = "/v1/files/{id}/content";

/// An endpoint of the document.
struct Operation {
    method: &'static str,
    path: &'static str,
    summary: &'static str,
    /// Names and schemas of its query parameters.
    query: Vec<(&'static str, Value)>,
    body: Option<Value>,
    response: Value,
}

/// The document.
pub(super) fn document() -> Value {
    let mut settings = SchemaSettings::draft2020_12();
    settings.definitions_path = "/components/schemas".into();
    let mut schemas = settings.into_generator();
    let error = json_content(&reference::<ErrorView>(&mut schemas));
    let mut paths = Map::new();
    let files = file_operations(&mut schemas);
    let batches = batch_operations(&mut schemas);
    let jobs = job_operations(&mut schemas);
    for operation in files.into_iter().chain(batches).chain(jobs) {
        let methods = paths.entry(operation.path).or_insert_with(|| json!({}));
        methods[operation.method] = described(&operation, &error);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "gristmill",
            "description": "OpenAI's batch API over gristmill's workers.",
            "version": env!("CARGO_PKG_VERSION"),
        },
        "paths": paths,
        "components": {
            "schemas": schemas.take_definitions(true),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    })
}

fn reference<T: JsonSchema>(schemas: &mut SchemaGenerator) -> Value {
    schemas.subschema_for::<T>().to_value()
}

fn json_content(schema: &Value) -> Value {
    json!({"application/json": {"schema": schema}})
}

/// A form with one file and further text fields.
fn form(file: &str, texts: &[&str]) -> Value {
    let mut fields = Map::new();
    fields.insert(file.into(), json!({"type": "string", "format": "binary"}));
    for name in texts {
        let schema = match *name {
            "purpose" => json!({"type": "string", "enum": [files::PURPOSE]}),
            "expires_after[anchor]" => json!({"type": "string", "enum": ["created_at"]}),
            _ => json!({"type": "integer", "minimum": EXPIRY_SECONDS_MIN, "maximum": EXPIRY_SECONDS_MAX}),
        };
        fields.insert(name.to_string(), schema);
    }
    let required: Vec<&str> = [file]
        .into_iter()
        .chain(texts.iter().copied().filter(|name| !name.contains('[')))
        .collect();
    let anchored = json!({"expires_after[seconds]": ["expires_after[anchor]"], "expires_after[anchor]": ["expires_after[seconds]"]});
    json!({"multipart/form-data": {"schema": {
        "type": "object",
        "properties": fields,
        "required": required,
        "dependentRequired": anchored,
        "additionalProperties": false,
    }}})
}

fn operation(method: &'static str, path: &'static str, summary: &'static str, response: Value) -> Operation {
    Operation {
        method,
        path,
        summary,
        query: Vec::new(),
        body: None,
        response,
    }
}

impl Operation {
    fn query(self, query: Vec<(&'static str, Value)>) -> Operation {
        Operation { query, ..self }
    }

    fn body(self, body: Value) -> Operation {
        Operation {
            body: Some(body),
            ..self
        }
    }
}

/// The query parameters of a list whose ids have this prefix.
fn list_query(prefix: &str, page: PageSize) -> Vec<(&'static str, Value)> {
    vec![
        ("after", id_schema(prefix)),
        (
            "limit",
            json!({"type": "integer", "minimum": 1, "maximum": page.max, "default": page.default}),
        ),
    ]
}

fn file_query() -> Vec<(&'static str, Value)> {
    let mut query = list_query(id::FILE, files::PAGE);
    query.push((
        "order",
        json!({"type": "string", "enum": ["asc", "desc"], "default": "desc"}),
    ));
    query.push(("purpose", json!({"type": "string"})));
    query
}

/// The form of an id.
fn id_schema(prefix: &str) -> Value {
    json!({"type": "string", "pattern": format!("^{prefix}[0-9a-v]{{26}}$")})
}

fn file_operations(schemas: &mut SchemaGenerator) -> Vec<Operation> {
    let file = json_content(&reference::<FileView>(schemas));
    let files = json_content(&reference::<ListView<FileView>>(schemas));
    let deleted = json_content(&reference::<DeletedView>(schemas));
    let upload = json_content(&reference::<UploadView>(schemas));
    let part = json_content(&reference::<PartView>(schemas));
    let begin = json_content(&reference::<UploadRequest>(schemas));
    let end = json_content(&reference::<CompleteRequest>(schemas));
    let lines = json!({"application/jsonl": {"schema": {"type": "string"}}});
    let file_form = form("file", &["purpose", "expires_after[anchor]", "expires_after[seconds]"]);
    let id = "/v1/files/{id}";
    vec![
        operation("get", "/v1/files", "Lists files, newest first", files).query(file_query()),
        operation("post", "/v1/files", "Uploads a file", file.clone()).body(file_form),
        operation("get", id, "A file", file),
        operation("delete", id, "Deletes a file", deleted),
        operation("get", CONTENT, "The content of a file", lines),
        operation("post", "/v1/uploads", "Begins a file in parts", upload.clone()).body(begin),
        operation("post", "/v1/uploads/{id}/parts", "Adds a part", part).body(form("data", &[])),
        operation(
            "post",
            "/v1/uploads/{id}/complete",
            "Joins the parts to a file",
            upload.clone(),
        )
        .body(end),
        operation("post", "/v1/uploads/{id}/cancel", "Gives the parts up", upload),
    ]
}

fn batch_operations(schemas: &mut SchemaGenerator) -> Vec<Operation> {
    let batch = json_content(&reference::<BatchView>(schemas));
    let batches = json_content(&reference::<ListView<BatchView>>(schemas));
    let body = json_content(&reference::<BatchRequest>(schemas));
    let model = json_content(&reference::<ModelView>(schemas));
    let models = json_content(&reference::<ListView<ModelView>>(schemas));
    vec![
        operation("get", "/v1/batches", "Lists batches, newest first", batches)
            .query(list_query(id::BATCH, batches::PAGE)),
        operation("post", "/v1/batches", "Creates a batch", batch.clone()).body(body),
        operation("get", "/v1/batches/{id}", "A batch", batch.clone()),
        operation("post", "/v1/batches/{id}/cancel", "Cancels a batch", batch),
        operation("get", "/v1/models", "Lists the models on offer", models),
        operation("get", "/v1/models/{id}", "A model", model),
    ]
}

/// A server-sent event.
fn event_schema() -> Value {
    let text = json!({"type": "string"});
    json!({"type": "object", "properties": {"event": text, "data": text}, "required": ["event", "data"]})
}

/// What the dashboard reads.
fn job_operations(schemas: &mut SchemaGenerator) -> Vec<Operation> {
    let job = json_content(&reference::<JobView>(schemas));
    let jobs = json_content(&reference::<JobList>(schemas));
    let rows = json_content(&reference::<RowList>(schemas));
    let limits = json_content(&reference::<ExtendRequest>(schemas));
    let events = json!({"text/event-stream": {"schema": event_schema()}});
    let nothing = json!({"application/json": {"schema": {"type": "object", "additionalProperties": false}}});
    let page = PageSize {
        default: batches::PAGE.default,
        max: PAGE_MAX,
    };
    let row_query = vec![
        (
            "kind",
            json!({"type": "string", "enum": ["failed", "answers"], "default": "failed"}),
        ),
        (
            "limit",
            json!({"type": "integer", "minimum": 1, "maximum": ROWS_MAX, "default": 20}),
        ),
        ("after", json!({"type": "integer", "minimum": 0})),
    ];
    vec![
        operation(
            "get",
            "/v1/jobs",
            "Lists batches as the dashboard shows them, newest first",
            jobs,
        )
        .query(list_query(id::BATCH, page)),
        operation(
            "get",
            "/v1/jobs/events",
            "The first page of the list, at each change",
            events.clone(),
        ),
        operation(
            "get",
            "/v1/jobs/{id}",
            "A batch with shards, workers and throughput",
            job.clone(),
        ),
        operation(
            "get",
            "/v1/jobs/{id}/events",
            "The same at each change, until it ends",
            events,
        ),
        operation(
            "get",
            "/v1/jobs/{id}/rows",
            "Failed rows with their prompts, or answers",
            rows,
        )
        .query(row_query),
        operation("post", "/v1/jobs/{id}/cancel", "Cancels a batch", job.clone()).body(nothing.clone()),
        operation(
            "post",
            "/v1/jobs/{id}/extend",
            "Raises limits: of jobs, never of batches",
            job.clone(),
        )
        .body(limits),
        operation(
            "post",
            "/v1/jobs/{id}/retry",
            "Retries failed rows: of jobs, never of batches",
            job,
        )
        .body(nothing),
    ]
}

/// An operation as the document has it.
fn described(operation: &Operation, error: &Value) -> Value {
    let in_query = |(name, schema): &(&str, Value)| json!({"name": name, "in": "query", "schema": schema});
    let mut parameters: Vec<Value> = operation.query.iter().map(in_query).collect();
    let has_id = operation.path.contains("{id}");
    if has_id {
        parameters.push(json!({"name": "id", "in": "path", "required": true, "schema": {"type": "string"}}));
    }
    let refusal = |description: &str| json!({"description": description, "content": error});
    let mut responses = json!({
        "200": {"description": operation.summary, "content": operation.response},
        "401": refusal("No key, or an unknown one"),
        "503": refusal("The store is away: try again after `Retry-After`"),
    });
    if operation.body.is_some() || !operation.query.is_empty() {
        responses["400"] = refusal("The request is invalid");
    }
    if operation.body.is_some() {
        responses["408"] = refusal("The body arrives too slowly");
        responses["413"] = refusal("The body is too large");
    }
    if has_id {
        responses["404"] = refusal("There is no such object");
    }
    if operation.path == "/v1/batches" && operation.method == "post" {
        responses["429"] = refusal("The tenant has too many unfinished batches: try again after `Retry-After`");
    }
    if has_id || operation.path == "/v1/batches" {
        responses["409"] = refusal("The object's state does not allow it");
    }
    if operation.path == CONTENT {
        let header = json!({"name": "Range", "in": "header", "schema": {"type": "string"}, "example": "bytes=100-"});
        parameters.push(header);
        let part = json!({"description": "The part that `Range` names", "content": operation.response});
        responses["206"] = part;
        responses["416"] = refusal("The file has nothing in this range");
    }
    let mut described = json!({"summary": operation.summary, "parameters": parameters, "responses": responses});
    if let Some(body) = &operation.body {
        described["requestBody"] = json!({"required": true, "content": body});
    }
    described
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reference_has_its_schema() {
        let document = document();
        let text = document.to_string();
        let names = text
            .split("#/components/schemas/")
            .skip(1)
            .map(|rest| rest.split('"').next().unwrap_or_default());
        for name in names {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
        assert_eq!(document["paths"].as_object().map(Map::len), Some(20));
        // The others may be null, or missing.
        assert_eq!(
            document["components"]["schemas"]["RowView"]["required"],
            json!(["row", "status"])
        );
        let limited = |path: &str, method: &str| document["paths"][path][method]["responses"]["429"].is_object();
        assert!(limited("/v1/batches", "post") && !limited("/v1/batches", "get") && !limited("/v1/files", "post"));
    }
}
