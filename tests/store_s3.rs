//! Real S3.
