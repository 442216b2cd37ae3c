//! Launches the kernel that copies rows of a table: embeddings, and the rows that have logits.

use half::bf16;

use super::Cuda;
use super::driver::Argument;
use super::memory::Buffer;
use super::plan::{self, KernelFormat};
use crate::device::{DeviceError, Placeholders};

impl Cuda {
    /// Copies the `count` rows of a BF16 `table` (its address and width) that the ids name, times a scale. An id
    /// may stand for one of the tokens drawn last, which lie at the second address, and placeholders for another id.
    pub(super) fn take_rows(
        &self,
        (table, width): (Argument, usize),
        (ids, drawn): (u64, Argument),
        count: usize,
        (scale, placeholders): (f32, Option<&Placeholders>),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        out.reshape(&self.context, count, width, KernelFormat::Bf16)?;
        // No id.
        const NONE: u32 = u32::MAX;
        let none = Placeholders {
            ids: [NONE; 3],
            read_as: NONE,
        };
        let Placeholders { ids: read, read_as } = *placeholders.unwrap_or(&none);
        let [first, second, third] = read.map(|id| Argument::Int(id as i32));
        self.launch(
            &plan::embed(width, count),
            &[
                table,
                Argument::Address(ids),
                drawn,
                out.data(),
                Argument::Int(count as i32),
                // Rounded to BF16, as in the reference.
                Argument::Float(bf16::from_f32(scale).to_f32()),
                Argument::Int(read_as as i32),
                first,
                second,
                third,
            ],
        )
    }
}
