//! A checkpoint (config, weights, tokenizer) and the one transformer that runs all families.

use std::io::Read;
use std::path::Path;

pub mod adapter;
mod adapters_apart;
mod balance;
mod block_names;
mod build;
mod canonical;
pub mod channels;
pub mod checkpoint;
pub mod coded_weights;
pub mod config;
pub mod error;
mod expert_forms;
mod expert_names;
pub mod folder;
pub mod gguf;
pub mod headers;
mod kv_layout;
mod names;
mod pool;
pub mod quantize;
pub mod quantized;
pub mod random_weights;
pub mod rope;
pub mod shapes;
pub mod size;
pub mod stored_form;
mod tensors;
mod times;
pub mod transformer;
pub mod weights;

pub use adapter::Adapter;
pub use adapters_apart::kept_values;
pub use channels::ActivationMaxima;
pub use checkpoint::Checkpoint;
pub use error::ModelError;
pub use pool::KvBudget;
pub use transformer::{LoadOptions, Transformer};

/// Reads a file of at most `max` bytes.
fn read_limited(path: &Path, max: u64) -> Result<Vec<u8>, ModelError> {
    let (file, size) = crate::regular::open(path).map_err(|e| ModelError::read(path, e))?;
    if size > max {
        return Err(ModelError::broken(
            path,
            format!("it has {size} bytes, more than {max}"),
        ));
    }
    let mut bytes = Vec::new();
    file.take(max + 1)
        .read_to_end(&mut bytes)
        .map_err(|e| ModelError::read(path, e))?;
    if bytes.len() as u64 > max {
        return Err(ModelError::broken(path, format!("larger than {max} bytes")));
    }
    Ok(bytes)
}
