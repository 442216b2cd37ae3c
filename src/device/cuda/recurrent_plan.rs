//! Launches of the kernels of recurrent layers, as plain values, and the layers that they compute.

use super::compile::Kernel;
use super::plan::Launch;
use crate::device::{DeviceError, RecurrentKind, RecurrentShape};

/// Maximum numbers of a head's state, which the registers of a thread block hold.
const STATE_MAX: usize = 1 << 14;
/// Maximum dimensions of a key, for which the convolution's factors fit into shared memory.
const KEY_MAX: usize = 256;
/// Threads of a block, at most; a thread has numbers of one dimension of the value.
const THREADS_MAX: usize = 512;
/// Maximum tokens that a convolution sees: a thread holds their inputs in registers.
const CONV_MAX: usize = 8;

/// Refuses recurrent layers that the kernels do not compute.
///
/// # Errors
/// Heads are too large, a row's size is not supported, or the convolution is too wide.
pub fn check_recurrent(shape: RecurrentShape) -> Result<(), DeviceError> {
    let RecurrentShape {
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        conv_width,
        ..
    } = shape;
    let is_small =
        key_dim <= KEY_MAX && value_dim <= THREADS_MAX && key_dim * value_dim <= STATE_MAX && conv_width <= CONV_MAX;
    // Rows are written in pairs. Outputs are rows of a matrix's input; in Mamba-2, those that share a key are normalised in vectors of eight.
    let group = shape.value_width() / key_heads;
    let has_vectors = shape.input_width().is_multiple_of(2)
        && shape.value_width().is_multiple_of(16)
        && (shape.kind == RecurrentKind::DeltaNet || group.is_multiple_of(8) && group <= 65536);
    if is_small && has_vectors {
        return Ok(());
    }
    Err(DeviceError::Unsupported(format!(
        "the model has recurrent layers with {value_heads} heads of {key_dim} x {value_dim} numbers, {key_heads} keys and convolutions of {conv_width} tokens; the GPU's kernels take heads of up to {STATE_MAX} numbers with keys of up to {KEY_MAX} and values of up to {THREADS_MAX}, rows of multiples of 16 in all and of 8 to a key, and convolutions of up to {CONV_MAX} tokens: compute with `--device cpu`"
    )))
}

/// Threads that share a dimension of a head's value.
fn lanes(shape: &RecurrentShape) -> usize {
    let mut lanes = 32;
    while lanes > 1 && lanes * shape.value_dim > THREADS_MAX {
        lanes /= 2;
    }
    lanes
}

/// Launch over the states of `sequences` sequences, one head per block.
pub fn recurrent(shape: &RecurrentShape, sequences: usize) -> Launch {
    let lanes = lanes(shape);
    let threads = (lanes * shape.value_dim).next_multiple_of(32) as u32;
    let kind = match shape.kind {
        RecurrentKind::DeltaNet => 0,
        RecurrentKind::Mamba2 => 1,
    };
    Launch {
        kernel: Kernel::new(
            "recurrent",
            &[
                ("KIND", kind),
                ("KEY_HEADS", shape.key_heads as u32),
                ("VALUE_HEADS", shape.value_heads as u32),
                ("KEY_DIM", shape.key_dim as u32),
                ("VALUE_DIM", shape.value_dim as u32),
                ("CONV", shape.conv_width as u32),
                ("LANES", lanes as u32),
                ("THREADS", threads),
            ],
        ),
        grid: [sequences as u32, shape.value_heads as u32],
        threads,
        shared_bytes: 0,
    }
}

/// Launch that keeps the last inputs of the convolution, one channel of a sequence per thread. None are
/// kept if the convolution sees a single token.
pub fn keep_inputs(shape: &RecurrentShape, sequences: usize) -> Launch {
    let blocks = if shape.conv_width > 1 {
        shape.conv_channels().div_ceil(256)
    } else {
        0
    };
    Launch {
        kernel: Kernel::new("keep_inputs", &[("CONV", shape.conv_width as u32)]),
        grid: [sequences as u32, blocks as u32],
        threads: 256,
        shared_bytes: 0,
    }
}

/// Launch over `count` values, a multiple of eight, which are multiplied by sigmoids of gates.
pub fn gate(count: usize) -> Launch {
    Launch {
        kernel: Kernel::new("gate", &[]),
        grid: [count.div_ceil(256 * 8) as u32, 1],
        threads: 256,
        shared_bytes: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: RecurrentShape = RecurrentShape {
        kind: RecurrentKind::DeltaNet,
        key_heads: 16,
        value_heads: 32,
        key_dim: 128,
        value_dim: 128,
        conv_width: 4,
    };
    const GRANITE: RecurrentShape = RecurrentShape {
        kind: RecurrentKind::Mamba2,
        key_heads: 1,
        value_heads: 128,
        value_dim: 64,
        ..QWEN
    };

    #[test]
    fn a_column_has_its_threads() {
        for (shape, value_dim, threads, of_column) in [
            (QWEN, 128, 512, 4),
            (GRANITE, 64, 512, 8),
            (QWEN, 512, 512, 1),
            (QWEN, 257, 288, 1),
            (QWEN, 7, 224, 32),
        ] {
            let shape = RecurrentShape { value_dim, ..shape };
            let launch = recurrent(&shape, 3);
            assert_eq!((launch.threads, lanes(&shape)), (threads, of_column));
            assert_eq!(launch.grid, [3, shape.value_heads as u32]);
            assert!(threads as usize >= of_column * value_dim);
        }
    }

    #[test]
    fn every_channel_is_kept() {
        assert_eq!(keep_inputs(&QWEN, 2).grid, [2, 32]);
        let odd = RecurrentShape { key_dim: 129, ..QWEN };
        assert_eq!(keep_inputs(&odd, 2).grid, [2, 33]);
        assert_eq!(keep_inputs(&RecurrentShape { conv_width: 1, ..QWEN }, 2).grid, [2, 0]);
        assert_eq!((gate(2048).grid, gate(2056).grid), ([1, 1], [2, 1]));
    }

    #[test]
    fn layers_that_the_kernels_do_not_compute_are_refused() {
        assert!(check_recurrent(QWEN).is_ok() && check_recurrent(GRANITE).is_ok());
        // Nemotron-H 56B, Nemotron Nano 9B v2 and Nemotron 3 Nano.
        for (value_heads, key_dim, value_dim) in [(256, 256, 64), (128, 128, 80), (64, 128, 64)] {
            let nemotron = RecurrentShape {
                key_heads: 8,
                value_heads,
                key_dim,
                value_dim,
                ..GRANITE
            };
            assert!(check_recurrent(nemotron).is_ok(), "{nemotron:?}");
        }
        let refused = |shape: RecurrentShape| {
            let error = check_recurrent(shape).unwrap_err().to_string();
            assert!(error.contains("--device cpu") && !error.contains('\n'), "{error}");
        };
        refused(RecurrentShape { key_dim: 129, ..QWEN });
        refused(RecurrentShape {
            key_dim: 264,
            value_dim: 32,
            ..QWEN
        });
        refused(RecurrentShape {
            key_dim: 16,
            value_dim: 528,
            ..QWEN
        });
        refused(RecurrentShape { conv_width: 9, ..QWEN });
        // Outputs of a row that fill no sixteen; an odd row; and heads to a key that fill no eight.
        refused(RecurrentShape {
            key_heads: 1,
            value_heads: 1,
            value_dim: 24,
            ..QWEN
        });
        refused(RecurrentShape {
            value_heads: 1,
            ..GRANITE
        });
        refused(RecurrentShape {
            key_heads: 4,
            value_heads: 4,
            value_dim: 12,
            ..GRANITE
        });
    }
}
