//! Formats of numbers: what a device computes in, what it keeps, and what a checkpoint stores.

use half::{bf16, f16};

/// Precision of a device's computations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Activations, keys and values in F32; weights as stored (widening F16 and BF16 to F32 is
    /// exact).
    F32,
    /// Weights, activations, keys and values are rounded to BF16 at the end of each operation;
    /// accumulation is in F32.
    Bf16,
    /// Linear weights and activations in 8 bits, with one scale per output feature and per token;
    /// accumulation is exact, in 32-bit integers. Everything else is in F32 on a CPU and in BF16 on
    /// a GPU; the format of keys and values is set by [`KvFormat`].
    Int8,
    /// As [`Int8`](Self::Int8), in E4M3 and with accumulation in F32; GPU only.
    Fp8,
    /// Linear weights in four bits where the checkpoint has them so, with its factors per group of a row, and activations in 8
    /// bits, with a scale per token and group. Other matrices are as in [`Int8`](Self::Int8).
    W4a8,
}

/// Storage format of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvFormat {
    F32,
    Bf16,
    /// 8 bits, with one scale per token and head; attention also quantizes queries and softmax
    /// weights to 8 bits.
    Int8,
    /// As [`Int8`](Self::Int8), in E4M3; GPU only.
    Fp8,
    /// 4 bits, with one scale and one zero point per token and head, of heads turned by a Hadamard transform. Attention computes
    /// with their 8 bits, as in [`Int8`](Self::Int8); CPU only.
    Int4,
}

impl KvFormat {
    pub const ALL: [KvFormat; 5] = [
        KvFormat::F32,
        KvFormat::Bf16,
        KvFormat::Int8,
        KvFormat::Fp8,
        KvFormat::Int4,
    ];

    /// Those that a CPU has.
    pub const ON_CPU: [KvFormat; 4] = [KvFormat::F32, KvFormat::Bf16, KvFormat::Int8, KvFormat::Int4];

    /// The name in job files and records.
    pub fn name(self) -> &'static str {
        match self {
            KvFormat::F32 => "f32",
            KvFormat::Bf16 => "bf16",
            KvFormat::Int8 => "int8",
            KvFormat::Fp8 => "fp8",
            KvFormat::Int4 => "int4",
        }
    }

    /// Bits per value.
    pub fn bits(self) -> u32 {
        match self {
            KvFormat::F32 => 32,
            KvFormat::Bf16 => 16,
            KvFormat::Int8 | KvFormat::Fp8 => 8,
            KvFormat::Int4 => 4,
        }
    }
}

impl Precision {
    pub const ALL: [Precision; 5] = [
        Precision::F32,
        Precision::Bf16,
        Precision::Int8,
        Precision::Fp8,
        Precision::W4a8,
    ];
    /// The precisions that a CPU computes in.
    pub const ON_CPU: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Int8, Precision::W4a8];
    /// The precisions that a GPU computes in.
    pub const ON_GPU: [Precision; 4] = [Precision::Bf16, Precision::Int8, Precision::Fp8, Precision::W4a8];

    /// The name in job files and records.
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Int8 => "int8",
            Precision::Fp8 => "fp8",
            Precision::W4a8 => "w4a8",
        }
    }

    /// The precision with this [name](Self::name).
    pub fn from_name(name: &str) -> Option<Precision> {
        Precision::ALL.into_iter().find(|precision| precision.name() == name)
    }

    /// Bits per value of the operands of linear layers, if the checkpoint does not give fewer.
    pub fn bits(self) -> u32 {
        match self {
            Precision::F32 => 32,
            Precision::Bf16 => 16,
            Precision::Int8 | Precision::Fp8 | Precision::W4a8 => 8,
        }
    }

    /// Default format of keys and values at this precision.
    pub fn kv_format(self) -> KvFormat {
        match self {
            Precision::F32 => KvFormat::F32,
            Precision::Bf16 => KvFormat::Bf16,
            Precision::Int8 | Precision::W4a8 => KvFormat::Int8,
            Precision::Fp8 => KvFormat::Fp8,
        }
    }
}

/// Number format of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    F32,
    F16,
    Bf16,
}

impl Dtype {
    /// Bytes per element.
    pub fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// Appends a number, rounded. `false`: it is finite, and too large for the format.
    pub fn append(self, x: f32, bytes: &mut Vec<u8>) -> bool {
        match self {
            Dtype::F32 => bytes.extend(x.to_le_bytes()),
            Dtype::F16 => bytes.extend(f16::from_f32(x).to_le_bytes()),
            Dtype::Bf16 => bytes.extend(bf16::from_f32(x).to_le_bytes()),
        }
        self.rounded(x).is_finite() || !x.is_finite()
    }

    /// The closest number of the format.
    pub fn rounded(self, x: f32) -> f32 {
        match self {
            Dtype::F32 => x,
            Dtype::F16 => f16::from_f32(x).to_f32(),
            Dtype::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// The name in messages and in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

/// A matrix as a checkpoint stores it: `[rows][columns]`, row-major, little-endian, not necessarily
/// aligned.
///
/// A vector is a matrix of one row.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    pub dtype: Dtype,
    pub rows: usize,
    pub columns: usize,
    /// `rows * columns * dtype.bytes()` bytes.
    pub data: &'a [u8],
}

impl Tensor<'_> {
    /// Writes row `row` to `out`, converted to F32 exactly.
    pub fn read_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.columns * self.dtype.bytes();
        let data = &self.data[row * bytes..(row + 1) * bytes];
        match self.dtype {
            Dtype::F32 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<4>().0) {
                    *x = f32::from_le_bytes(*b);
                }
            }
            Dtype::F16 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                    *x = f16::from_le_bytes(*b).to_f32();
                }
            }
            Dtype::Bf16 => {
                for (x, b) in out.iter_mut().zip(data.as_chunks::<2>().0) {
                    *x = bf16::from_le_bytes(*b).to_f32();
                }
            }
        }
    }
}
