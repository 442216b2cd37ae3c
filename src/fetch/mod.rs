//! Brings a model's files to this machine: from the Hugging Face hub (`hf://`), or from a folder in
//! an object store (`s3://`, `gs://`, `az://`).
//!
//! `address` reads addresses, `hub` speaks the hub's protocol, `store` reads a folder of a store,
//! `needed` chooses the files that a model needs, `download` brings one file, resumed and verified,
//! `cache` knows the folders and the locks, and `snapshot` offers all of it as a folder.
//!
//! See docs/decisions/098-models-are-fetched-by-the-program.md.

pub mod address;
mod cache;
mod download;
mod error;
mod hub;
mod needed;
mod snapshot;
mod store;

pub use address::ModelAddress;
pub use error::FetchError;
pub use snapshot::Snapshot;
