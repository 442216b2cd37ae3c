//! Adapters beside a model's weights: each adds a product of low rank to some of its linear operations.

/// What an adapter adds to a linear operation: `y += up (down x)` (Hu et al. 2021).
pub struct LowRank<M> {
    /// `[rank][in features]`.
    pub down: M,
    /// `[out features][rank]`.
    pub up: M,
}

/// What each adapter of a model adds to one linear operation, in the adapters' order. `None`: it leaves the operation as it is.
pub type AdapterParts<M> = [Option<LowRank<M>>];
