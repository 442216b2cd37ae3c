//! Matrices in codes of four bits, as a checkpoint stores them.

/// Groups of several in a row have a multiple of so many columns.
pub const GROUP_STEP: usize = 8;
/// Zero points and codes are below this.
pub const CODES: u8 = 16;
/// The zero point of codes that stand for the numbers from -8 to 7.
pub const MIDDLE: u8 = 8;

/// A matrix of whole numbers from 0 to 15, the codes. The weight of a code is `(code - zero) * factor`, where the columns of a
/// row's group have one factor and one zero point.
#[derive(Debug, Clone, PartialEq)]
pub struct CodedMatrix {
    pub rows: usize,
    pub columns: usize,
    /// Columns of a group: all, or a multiple of [`GROUP_STEP`] that divides them.
    pub group: usize,
    /// `[rows][columns]`.
    pub codes: Vec<u8>,
    /// `[rows][groups]`.
    pub factors: Vec<f32>,
    /// `[rows][groups]`. `None`: all are [`MIDDLE`].
    pub zeros: Option<Vec<u8>>,
}

impl CodedMatrix {
    /// Whether the columns of a matrix may be in groups of this size.
    pub fn has_groups_of(columns: usize, group: usize) -> bool {
        group > 0 && (group == columns || group.is_multiple_of(GROUP_STEP) && columns.is_multiple_of(group))
    }

    /// Groups of a row.
    pub fn groups(&self) -> usize {
        self.columns / self.group
    }

    /// Some of the rows, in this order.
    #[must_use]
    pub fn with_rows(&self, rows: &[usize]) -> CodedMatrix {
        let groups = self.groups();
        CodedMatrix {
            rows: rows.len(),
            columns: self.columns,
            group: self.group,
            codes: picked(&self.codes, rows, self.columns),
            factors: picked(&self.factors, rows, groups),
            zeros: self.zeros.as_ref().map(|zeros| picked(zeros, rows, groups)),
        }
    }
}

/// Some rows of `width` values each.
fn picked<E: Copy>(values: &[E], rows: &[usize], width: usize) -> Vec<E> {
    let rows = rows.iter().map(|row| &values[row * width..][..width]);
    rows.flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_all_columns_or_steps_that_divide_them() {
        let fits = |columns, group| CodedMatrix::has_groups_of(columns, group);
        assert!(fits(96, 32) && fits(96, 96) && fits(24, 8) && fits(7, 7));
        assert!(!fits(96, 64) && !fits(96, 12) && !fits(96, 0) && !fits(14, 7));
    }

    #[test]
    fn a_row_takes_its_factors_and_zero_points_along() {
        let matrix = CodedMatrix {
            rows: 3,
            columns: 16,
            group: 8,
            codes: (0..48).map(|i| i % 16).collect(),
            factors: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            zeros: Some(vec![1, 2, 3, 4, 5, 6]),
        };
        let picked = matrix.with_rows(&[2, 0]);
        assert_eq!((picked.rows, picked.groups()), (2, 2));
        assert_eq!(picked.codes, [&matrix.codes[32..], &matrix.codes[..16]].concat());
        assert_eq!(picked.factors, [5.0, 6.0, 1.0, 2.0]);
        assert_eq!(picked.zeros, Some(vec![5, 6, 1, 2]));
    }
}
