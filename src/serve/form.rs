//! Multipart forms, with limits of size and time. Their fields may come in any order.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use axum::body::Body;
use axum::extract::multipart::{Field, Multipart, MultipartError};
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use bytes::Bytes;
use futures::StreamExt;

use super::content::{ContentWriter, FILE_BYTES_MAX};
use super::error::{ApiError, ApiResult};
use super::request::BODY_PAUSE_MAX;
use crate::dataset::store::location::Location;

/// Maximum size of a field that is no file.
const FIELD_BYTES_MAX: usize = 4 << 10;
/// Maximum bytes of what stands between the contents of two fields: the rest of a chunk, and the
/// next field's headers.
const HEADERS_BYTES_MAX: usize = 1 << 20;
/// Maximum length of a field's name that is quoted, in characters.
const NAME_CHARS_SHOWN: usize = 80;

/// A form that is being read.
pub(super) struct Form {
    parts: Multipart,
    /// Bytes that arrived since the end of the last field's content.
    between: Arc<AtomicUsize>,
}

impl<S: Send + Sync> FromRequest<S> for Form {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> ApiResult<Form> {
        let between = Arc::new(AtomicUsize::new(0));
        let (head, body) = request.into_parts();
        let counter = between.clone();
        // The parser collects a field's headers until they end, whatever their length.
        let limited = body.into_data_stream().map(move |chunk| {
            let chunk = chunk.map_err(std::io::Error::other)?;
            match counter.fetch_add(chunk.len(), Relaxed) {
                before if before > HEADERS_BYTES_MAX => Err(std::io::Error::other("a field has too long headers")),
                _ => Ok(chunk),
            }
        });
        let request = Request::from_parts(head, Body::from_stream(limited));
        match Multipart::from_request(request, state).await {
            Ok(parts) => Ok(Form { parts, between }),
            Err(error) => Err(ApiError::invalid(format!("the body is no multipart form: {error}"))),
        }
    }
}

/// A field of a form that is being read.
pub(super) struct FormField<'a> {
    field: Field<'a>,
    between: &'a AtomicUsize,
}

impl Form {
    /// The next field; `None` at the end.
    pub(super) async fn next_field(&mut self) -> ApiResult<Option<FormField<'_>>> {
        self.between.store(0, Relaxed);
        let between = self.between.as_ref();
        match tokio::time::timeout(BODY_PAUSE_MAX, self.parts.next_field()).await {
            Err(_) => Err(ApiError::too_slow()),
            Ok(Ok(field)) => Ok(field.map(|field| FormField { field, between })),
            Ok(Err(error)) => Err(form_error(&error)),
        }
    }
}

impl FormField<'_> {
    pub(super) fn name(&self) -> String {
        self.field.name().unwrap_or_default().to_string()
    }

    pub(super) fn file_name(&self) -> Option<&str> {
        self.field.file_name()
    }

    /// The refusal of a field that the endpoint does not know.
    pub(super) fn unknown(&self) -> ApiError {
        let shown: String = self.name().chars().take(NAME_CHARS_SHOWN).collect();
        ApiError::invalid_param(&shown, format!("`{shown}` is not supported"))
    }

    async fn next_chunk(&mut self) -> ApiResult<Option<Bytes>> {
        // These bytes are content.
        self.between.store(0, Relaxed);
        match tokio::time::timeout(BODY_PAUSE_MAX, self.field.chunk()).await {
            Err(_) => Err(ApiError::too_slow()),
            Ok(chunk) => chunk.map_err(|error| form_error(&error)),
        }
    }

    /// Reads a field that is no file.
    pub(super) async fn text(mut self) -> ApiResult<String> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.next_chunk().await? {
            if bytes.len() + chunk.len() > FIELD_BYTES_MAX {
                let message = format!("a form field is larger than {FIELD_BYTES_MAX} bytes");
                return Err(ApiError::invalid(message));
            }
            bytes.extend_from_slice(&chunk);
        }
        String::from_utf8(bytes).map_err(|_| ApiError::invalid("a form field is no UTF-8 text"))
    }

    /// Writes a file to the store while it arrives, and returns its size.
    pub(super) async fn store(mut self, content: &Location, bytes_max: u64) -> ApiResult<u64> {
        let mut writer = ContentWriter::begin(content, bytes_max).await?;
        loop {
            let written = match self.next_chunk().await {
                Ok(None) => return writer.finish().await,
                Ok(Some(chunk)) => writer.write(chunk).await,
                Err(error) => Err(error),
            };
            if let Err(error) = written {
                writer.abort().await;
                return Err(error);
            }
        }
    }
}

fn form_error(error: &MultipartError) -> ApiError {
    if error.status() == StatusCode::PAYLOAD_TOO_LARGE {
        return ApiError::too_large(FILE_BYTES_MAX);
    }
    ApiError::invalid(format!("the form is broken or ended early: {}", error.body_text()))
}
