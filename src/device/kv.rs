//! The shapes of keys and values: of a token's heads, and of the layers that share a pool's blocks.

/// Layout of one token's `[q heads][k heads][v heads]` row of the fused projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadShape {
    pub heads: usize,
    /// Divides `heads`: `heads / kv_heads` query heads share a key and value head.
    pub kv_heads: usize,
    /// Head dimension; even.
    pub head_dim: usize,
    /// How many of a key's first numbers are its value, too. `None`: values are stored by themselves.
    pub value_in_key: Option<usize>,
}

impl HeadShape {
    /// Width of the fused projection's rows.
    pub fn qkv_width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Width of all queries of a row.
    pub fn q_width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Width of rows of `[q][k][v]`, or of `[q][k]` where keys have their values in them.
    pub fn row_width(&self) -> usize {
        let kv = self.kv_heads * self.head_dim;
        let values = if self.value_in_key.is_some() { 0 } else { kv };
        self.q_width() + kv + values
    }

    /// Numbers of a head's value.
    pub fn value_dim(&self) -> usize {
        self.value_in_key.unwrap_or(self.head_dim)
    }

    /// A pool's only shape: each block holds one layer with these heads.
    pub fn alone(self) -> [KvShape; 1] {
        [KvShape { heads: self, layers: 1 }]
    }
}

/// One of the shapes that layers have in a pool of keys and values. A block belongs to layers of one
/// shape at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvShape {
    pub heads: HeadShape,
    /// Number of layers that a block holds if it belongs to layers of this shape.
    pub layers: usize,
}

/// The place of a layer's keys and values in its pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvPlace {
    pub heads: HeadShape,
    /// Index of the layer's block table.
    pub table: usize,
    /// Index of the layer among those in a block; below its shape's [`layers`](KvShape::layers).
    pub part: usize,
}

impl KvPlace {
    /// The place in a pool with one shape and one layer, in the first block table.
    pub fn alone(heads: HeadShape) -> KvPlace {
        KvPlace {
            heads,
            table: 0,
            part: 0,
        }
    }
}

/// Keys that a layer's queries see, and that its cache must keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvSpec {
    /// Every key up to the query's own position.
    Full,
    /// Keys `j` of a query at `i` with `i - j < window`.
    Window(u32),
}

impl KvSpec {
    /// Number of positions before a token whose keys and values must be kept to compute it; `None`:
    /// all. It is at least 1, since scales of values in 8 bits depend on the token before.
    pub fn needed_before(self) -> Option<u32> {
        match self {
            KvSpec::Full => None,
            KvSpec::Window(window) => Some(window.saturating_sub(1).max(1)),
        }
    }

    /// The first position whose key and value must be kept to compute a token at `position`.
    pub fn first_needed(self, position: u32) -> u32 {
        self.needed_before().map_or(0, |needed| position.saturating_sub(needed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_needs_its_window_and_the_token_before() {
        let first = |window| [0, 1, 3, 4, 100].map(|position| KvSpec::Window(window).first_needed(position));
        assert_eq!(first(4), [0, 0, 0, 1, 97]);
        assert_eq!(first(2), [0, 0, 2, 3, 99]);
        assert_eq!(first(1), [0, 0, 2, 3, 99]);
        assert_eq!(first(u32::MAX), [0; 5]);
        assert_eq!(KvSpec::Full.first_needed(100), 0);
    }
}
