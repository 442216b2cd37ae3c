//! Which tensors hold a quantized matrix.

use safetensors::Dtype;

use super::bitsandbytes;
use super::numbers::{self, Table};
use super::packing::Packing;
use super::{Blocks, Method, Quantization};
use crate::model::weights::TensorEntry;
use crate::printable::printable_name;

/// The name of a tensor in its file and its entry there, by the name that it has in models that are
/// built.
pub(in crate::model) type Lookup<'a> = &'a dyn Fn(&str) -> Option<(&'a str, &'a TensorEntry)>;

/// Why a matrix is not read.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::model) enum Problem {
    /// There is no tensor of this name.
    Missing(String),
    Wrong(String),
}

/// How a matrix is stored.
#[derive(Debug)]
pub(in crate::model) struct StoredMatrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) numbers: Numbers,
    pub(super) factors: Factors,
    pub(super) zeros: Option<Zeros>,
    /// The tensor with the group of each column. `None`: groups are neighbours.
    pub(super) column_groups: Option<String>,
}

/// What a matrix' codes are.
#[derive(Debug)]
pub(super) struct Numbers {
    pub tensor: String,
    pub packing: Packing,
    pub meaning: Meaning,
}

/// What codes stand for.
#[derive(Debug)]
pub(super) enum Meaning {
    Known(Box<Table>),
    /// A tensor of 16 numbers.
    Stored(String),
}

/// The factors of a matrix, and how many numbers share one.
#[derive(Debug)]
pub(super) struct Factors {
    pub source: FactorSource,
    pub shared: Shared,
    /// They lie as `[groups][rows]`.
    pub is_transposed: bool,
}

#[derive(Debug)]
pub(super) enum FactorSource {
    Numbers {
        tensor: String,
        /// A factor of all factors.
        whole: Option<Whole>,
    },
    /// Exponents of 2.
    PowersOfTwo(String),
    BitsAndBytes(bitsandbytes::Factors),
}

#[derive(Debug)]
pub(super) enum Whole {
    Times(String),
    DividedBy(String),
}

/// Which numbers have a factor in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shared {
    Blocks(Blocks),
    /// Those of a row's group, of which there are so many.
    Groups(usize),
    /// So many that follow each other, row behind row.
    Run(usize),
}

impl Shared {
    /// How many rows and columns of factors a matrix has.
    pub(super) fn count(self, (rows, columns): (usize, usize)) -> (usize, usize) {
        match self {
            Shared::Blocks(blocks) => (rows.div_ceil(blocks.rows), columns.div_ceil(blocks.columns)),
            Shared::Groups(groups) => (rows, groups),
            Shared::Run(length) => (1, (rows * columns).div_ceil(length)),
        }
    }
}

/// Which numbers share a factor, by the shape of the factors. `None`: it is none of a matrix of this size.
fn shared(shape: &[usize], (rows, columns): (usize, usize), blocks: Option<Blocks>) -> Option<Shared> {
    let whole = Shared::Blocks(Blocks { rows, columns });
    match *shape {
        [] | [1] | [1, 1] => Some(whole),
        [count] => (count == rows).then_some(Shared::Groups(1)),
        [down, across] => {
            let by_block = blocks.map(Shared::Blocks);
            let by_group = (1..=columns).contains(&across) && columns.is_multiple_of(across);
            let by_group = by_group.then_some(Shared::Groups(across));
            let fits = |shared: &Shared| shared.count((rows, columns)) == (down, across);
            by_block.filter(fits).or(by_group.filter(fits))
        }
        _ => None,
    }
}

/// The zero points of a matrix, one for each factor.
#[derive(Debug)]
pub(super) struct Zeros {
    pub tensor: String,
    pub packing: Packing,
    pub table: Box<Table>,
    /// `Some`: they are stored less 1, in codes of so many bits.
    pub less_one: Option<u32>,
}

/// The tensors beside the matrix `stem.weight`.
pub(super) struct Beside<'a> {
    stem: &'a str,
    lookup: Lookup<'a>,
}

impl<'a> Beside<'a> {
    pub(super) fn optional(&self, suffix: &str) -> Option<(String, &'a TensorEntry)> {
        let name = format!("{}.{suffix}", self.stem);
        (self.lookup)(&name).map(|(_, entry)| (name, entry))
    }

    pub(super) fn required(&self, suffix: &str) -> Result<(String, &'a TensorEntry), Problem> {
        self.optional(suffix)
            .ok_or_else(|| Problem::Missing(format!("{}.{suffix}", self.stem)))
    }
}

/// A tensor that does not fit a matrix.
fn wrong(name: &str, entry: &TensorEntry, (rows, columns): (usize, usize), of: &str) -> Problem {
    Problem::Wrong(format!(
        "tensor `{}` of {:?} has shape {}, which is none of {of} of a matrix of {rows} × {columns}",
        printable_name(name),
        entry.dtype,
        printable_name(&format!("{:?}", entry.shape)),
    ))
}

/// Sizes of the packed numbers that are read: those that never lie in two words.
const PACKED_BITS: [u32; 3] = [2, 4, 8];

impl StoredMatrix {
    /// How the matrix `name` is stored. `None`: plainly, or not at all.
    ///
    /// # Errors
    /// A tensor that belongs to it is missing, or has another format or shape.
    pub(in crate::model) fn find<'a>(
        quantization: Quantization,
        name: &'a str,
        (rows, columns): (usize, usize),
        lookup: Lookup<'a>,
    ) -> Result<Option<StoredMatrix>, Problem> {
        let Some(stem) = name.strip_suffix(".weight") else {
            return Ok(None);
        };
        let Some((stored, entry)) = lookup(name) else {
            return Ok(None);
        };
        let last = stored.rsplit('.').next().unwrap_or(stored);
        let found = Found {
            quantization,
            name,
            entry,
            beside: Beside { stem, lookup },
            size: (rows, columns),
        };
        match (quantization.method, last, entry.dtype) {
            (Method::BitsAndBytes, "weight", Dtype::I8) => found.bitsandbytes_bytes(),
            (Method::BitsAndBytes, "weight", Dtype::U8) => found.bitsandbytes_halves(),
            (Method::Fp8 | Method::CompressedTensors | Method::ModelOpt, "weight", Dtype::F8_E4M3)
            | (Method::CompressedTensors, "weight", Dtype::I8) => found.bytes(quantization.blocks),
            (Method::CompressedTensors, "weight_packed", Dtype::I32) => found.words(),
            (Method::CompressedTensors, "weight_packed", Dtype::U8) | (Method::ModelOpt, "weight", Dtype::U8) => {
                found.halves()
            }
            (Method::Awq, "qweight", Dtype::I32) => found.awq(),
            (Method::Gptq { zeros_less_one }, "qweight", Dtype::I32) => found.gptq(zeros_less_one),
            _ => return Ok(None),
        }
        .map(Some)
    }

    /// Names of the tensors beside the numbers that are read.
    pub(in crate::model) fn beside(&self) -> Vec<&str> {
        let mut names = Vec::new();
        match &self.factors.source {
            FactorSource::Numbers { tensor, whole } => {
                names.push(tensor.as_str());
                if let Some(Whole::Times(name) | Whole::DividedBy(name)) = whole {
                    names.push(name);
                }
            }
            FactorSource::PowersOfTwo(tensor) => names.push(tensor),
            FactorSource::BitsAndBytes(factors) => names.extend(factors.tensors()),
        }
        if let Meaning::Stored(table) = &self.numbers.meaning {
            names.push(table);
        }
        names.extend(self.zeros.iter().map(|zeros| zeros.tensor.as_str()));
        names.extend(self.column_groups.as_deref());
        names
    }
}

/// The numbers of a matrix, and what is beside them.
pub(super) struct Found<'a> {
    quantization: Quantization,
    pub name: &'a str,
    pub entry: &'a TensorEntry,
    pub beside: Beside<'a>,
    pub size: (usize, usize),
}

impl Found<'_> {
    pub(super) fn wrong(&self, name: &str, entry: &TensorEntry, of: &str) -> Problem {
        wrong(name, entry, self.size, of)
    }

    pub(super) fn numbers(&self, packing: Packing, meaning: Table) -> Result<Numbers, Problem> {
        let (rows, columns) = self.size;
        if self.entry.shape != packing.shape(rows, columns) {
            return Err(self.wrong(self.name, self.entry, "the shapes"));
        }
        Ok(Numbers {
            tensor: self.name.to_owned(),
            packing,
            meaning: Meaning::Known(Box::new(meaning)),
        })
    }

    pub(super) fn matrix(&self, numbers: Numbers, source: FactorSource, shared: Shared) -> StoredMatrix {
        let (rows, columns) = self.size;
        StoredMatrix {
            rows,
            columns,
            numbers,
            factors: Factors {
                source,
                shared,
                is_transposed: false,
            },
            zeros: None,
            column_groups: None,
        }
    }

    /// Factors that are numbers, one for each row's groups, each row, each block, or all.
    fn factors(&self, suffix: &str, blocks: Option<Blocks>) -> Result<(String, Shared), Problem> {
        let (name, entry) = self.beside.required(suffix)?;
        let shared = shared(&entry.shape, self.size, blocks).filter(|_| numbers::is_float(entry.dtype));
        match shared {
            Some(shared) => Ok((name, shared)),
            None => Err(self.wrong(&name, entry, "the factors")),
        }
    }

    /// A single number.
    fn single(&self, suffix: &str) -> Result<String, Problem> {
        let (name, entry) = self.beside.required(suffix)?;
        let is_single = entry.dtype == Dtype::F32 && matches!(entry.shape[..], [] | [1]);
        if !is_single {
            return Err(self.wrong(&name, entry, "the factors"));
        }
        Ok(name)
    }

    /// E4M3, or whole numbers of 8 bits.
    fn bytes(&self, blocks: Option<Blocks>) -> Result<StoredMatrix, Problem> {
        let is_whole = self.entry.dtype == Dtype::I8;
        let table = if is_whole {
            numbers::signed_bytes()
        } else {
            numbers::e4m3_table()
        };
        let numbers = self.numbers(Packing::Bytes, table)?;
        let suffix = match self.quantization.method {
            Method::Fp8 if self.beside.optional("weight_scale").is_none() => "weight_scale_inv",
            _ => "weight_scale",
        };
        let (tensor, shared) = self.factors(suffix, blocks)?;
        let mut matrix = self.matrix(numbers, FactorSource::Numbers { tensor, whole: None }, shared);
        if is_whole && let Some((name, entry)) = self.zero_points()? {
            matrix.zeros = Some(self.zero_bytes(name, entry, shared)?);
        }
        Ok(matrix)
    }

    /// Whole numbers of few bits, shifted so that none is below 0.
    fn words(&self) -> Result<StoredMatrix, Problem> {
        let (rows, columns) = self.size;
        let fits = |bits: &u32| self.entry.shape == Packing::Along { bits: *bits }.shape(rows, columns);
        let Some(bits) = PACKED_BITS.into_iter().find(fits) else {
            return Err(self.wrong(self.name, self.entry, "the packings in 2, 4 or 8 bits"));
        };
        let table = numbers::whole(bits, -((1u32 << (bits - 1)) as f32));
        let numbers = self.numbers(Packing::Along { bits }, table)?;
        let column_groups = self.column_groups("weight_g_idx")?;
        let (tensor, shared) = match &column_groups {
            None => self.factors("weight_scale", None)?,
            Some(_) => self.factors_of_groups("weight_scale", |groups| [rows, groups])?,
        };
        let mut matrix = self.matrix(numbers, FactorSource::Numbers { tensor, whole: None }, shared);
        matrix.zeros = match self.zero_points()? {
            None => None,
            Some((name, entry)) if entry.dtype == Dtype::I8 => Some(self.zero_bytes(name, entry, shared)?),
            Some((name, entry)) => Some(self.zeros(name, entry, shared, Packing::Down { bits }, table)?),
        };
        matrix.column_groups = column_groups;
        Ok(matrix)
    }

    /// E2M1, with factors in E4M3 and a factor of these, or with exponents.
    fn halves(&self) -> Result<StoredMatrix, Problem> {
        let packing = Packing::Halves { first_is_high: false };
        let numbers = self.numbers(packing, numbers::of_four_bits(numbers::FP4))?;
        let (name, entry) = self.beside.required("weight_scale")?;
        if entry.dtype == Dtype::U8 {
            let shared =
                shared(&entry.shape, self.size, None).ok_or_else(|| self.wrong(&name, entry, "the factors"))?;
            return Ok(self.matrix(numbers, FactorSource::PowersOfTwo(name), shared));
        }
        let (tensor, shared) = self.factors("weight_scale", None)?;
        let whole = match self.beside.optional("weight_global_scale") {
            Some(_) => Whole::DividedBy(self.single("weight_global_scale")?),
            None => Whole::Times(self.single("weight_scale_2")?),
        };
        let whole = Some(whole);
        Ok(self.matrix(numbers, FactorSource::Numbers { tensor, whole }, shared))
    }

    fn awq(&self) -> Result<StoredMatrix, Problem> {
        let (rows, _) = self.size;
        if !rows.is_multiple_of(8) {
            return Err(self.wrong(self.name, self.entry, "the shapes"));
        }
        let table = numbers::whole(4, 0.0);
        let numbers = self.numbers(Packing::Awq, table)?;
        let (tensor, shared) = self.factors_of_groups("scales", |groups| [groups, rows])?;
        let mut matrix = self.matrix(numbers, FactorSource::Numbers { tensor, whole: None }, shared);
        matrix.factors.is_transposed = true;
        let (name, entry) = self.beside.required("qzeros")?;
        matrix.zeros = Some(self.zeros(name, entry, shared, Packing::Awq, table)?);
        Ok(matrix)
    }

    fn gptq(&self, zeros_less_one: bool) -> Result<StoredMatrix, Problem> {
        let (rows, columns) = self.size;
        let fits = |bits: &u32| self.entry.shape == Packing::Transposed { bits: *bits }.shape(rows, columns);
        let Some(bits) = PACKED_BITS.into_iter().find(fits) else {
            return Err(self.wrong(self.name, self.entry, "the packings in 2, 4 or 8 bits"));
        };
        let table = numbers::whole(bits, 0.0);
        let numbers = self.numbers(Packing::Transposed { bits }, table)?;
        let column_groups = self.column_groups("g_idx")?;
        let (tensor, shared) = self.factors_of_groups("scales", |groups| [groups, rows])?;
        let mut matrix = self.matrix(numbers, FactorSource::Numbers { tensor, whole: None }, shared);
        matrix.factors.is_transposed = true;
        let (name, entry) = self.beside.required("qzeros")?;
        let zeros = self.zeros(name, entry, shared, Packing::Across { bits }, table)?;
        matrix.zeros = Some(Zeros {
            less_one: zeros_less_one.then_some(bits),
            ..zeros
        });
        matrix.column_groups = column_groups;
        Ok(matrix)
    }

    /// Factors of groups of columns. `shape`: of a tensor of so many groups.
    fn factors_of_groups(
        &self,
        suffix: &str,
        shape: impl Fn(usize) -> [usize; 2],
    ) -> Result<(String, Shared), Problem> {
        let (_, columns) = self.size;
        let (name, entry) = self.beside.required(suffix)?;
        let fits = |groups: &&usize| (1..=columns).contains(*groups) && entry.shape == shape(**groups);
        let groups = entry.shape.iter().find(fits).filter(|_| numbers::is_float(entry.dtype));
        // Where columns name their groups, these may have any sizes.
        let are_named = ["g_idx", "weight_g_idx"]
            .iter()
            .any(|name| self.beside.optional(name).is_some());
        match groups.filter(|groups| are_named || columns.is_multiple_of(**groups)) {
            Some(groups) => Ok((name, Shared::Groups(*groups))),
            None => Err(self.wrong(&name, entry, "the factors")),
        }
    }

    fn column_groups(&self, suffix: &str) -> Result<Option<String>, Problem> {
        let found = if self.quantization.has_column_groups {
            Some(self.beside.required(suffix)?)
        } else {
            self.beside.optional(suffix)
        };
        let Some((name, entry)) = found else {
            return Ok(None);
        };
        if entry.dtype != Dtype::I32 || entry.shape != [self.size.1] {
            return Err(self.wrong(&name, entry, "the groups of columns"));
        }
        Ok(Some(name))
    }

    /// The zero points of compressed-tensors.
    fn zero_points(&self) -> Result<Option<(String, &TensorEntry)>, Problem> {
        if self.quantization.has_zeros {
            self.beside.required("weight_zero_point").map(Some)
        } else {
            Ok(self.beside.optional("weight_zero_point"))
        }
    }

    /// Zero points of a byte each, in the order of the factors.
    fn zero_bytes(&self, name: String, entry: &TensorEntry, of: Shared) -> Result<Zeros, Problem> {
        let (rows, columns) = of.count(self.size);
        if entry.dtype != Dtype::I8 || entry.shape.iter().product::<usize>() != rows * columns {
            return Err(self.wrong(&name, entry, "the zero points"));
        }
        Ok(Zeros {
            tensor: name,
            packing: Packing::Bytes,
            table: Box::new(numbers::signed_bytes()),
            less_one: None,
        })
    }

    /// Packed zero points.
    fn zeros(
        &self,
        name: String,
        entry: &TensorEntry,
        of: Shared,
        packing: Packing,
        table: Table,
    ) -> Result<Zeros, Problem> {
        let (rows, columns) = of.count(self.size);
        if entry.dtype != Dtype::I32 || entry.shape != packing.shape(rows, columns) {
            return Err(self.wrong(&name, entry, "the zero points"));
        }
        Ok(Zeros {
            tensor: name,
            packing,
            table: Box::new(table),
            less_one: None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: (usize, usize) = (6, 8);

    #[test]
    fn the_shape_of_factors_says_what_shares_them() {
        let blocks = Blocks { rows: 4, columns: 3 };
        let whole = Shared::Blocks(Blocks { rows: 6, columns: 8 });
        for (shape, blocks, want) in [
            (&[][..], None, Some(whole)),
            (&[1], None, Some(whole)),
            (&[1, 1], None, Some(whole)),
            (&[6], None, Some(Shared::Groups(1))),
            (&[6, 1], None, Some(Shared::Groups(1))),
            (&[6, 4], None, Some(Shared::Groups(4))),
            (&[6, 3], None, None),
            (&[6, 9], None, None),
            (&[6, 0], None, None),
            (&[8], None, None),
            (&[4, 6], None, None),
            (&[2, 3], None, None),
            (&[2, 3], Some(blocks), Some(Shared::Blocks(blocks))),
            (&[3, 2], Some(blocks), None),
            (&[6, 4], Some(blocks), Some(Shared::Groups(4))),
            (&[6, 4, 1], None, None),
        ] {
            assert_eq!(shared(shape, SIZE, blocks), want, "{shape:?}");
        }
    }

    #[test]
    fn cut_blocks_and_runs_have_factors_of_their_own() {
        let blocks = Shared::Blocks(Blocks { rows: 4, columns: 3 });
        assert_eq!(
            [blocks, Shared::Groups(4), Shared::Run(7)].map(|of| of.count(SIZE)),
            [(2, 3), (6, 4), (1, 7)]
        );
    }
}
