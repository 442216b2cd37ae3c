//! What a store's errors mean: nothing there, worth another try, or a matter for a person.

/// What an error of the store means for the request that met it.
pub(super) enum Meaning {
    /// Nothing lies there.
    Missing,
    /// May be gone at the next try.
    Transient,
    /// Will not be gone: why, and what to do.
    Lasting(&'static str),
    /// Will not be gone until a person has given permission, or credentials were renewed.
    Denied(&'static str),
}

/// What `error` means, by its kind and, locally, by the I/O error inside.
pub(super) fn meaning(error: &object_store::Error) -> Meaning {
    use object_store::Error as E;
    use std::io::ErrorKind as Io;
    match error {
        E::NotFound { .. } => return Meaning::Missing,
        E::PermissionDenied { .. } => return Meaning::Denied("no permission"),
        E::Unauthenticated { .. } => return Meaning::Denied("the store does not accept the credentials"),
        E::NotSupported { .. } | E::NotImplemented { .. } => {
            return Meaning::Lasting("the store cannot do this, and the guarantee needs it: choose another store");
        }
        E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => return Meaning::Lasting("not a usable address"),
        _ => {}
    }
    match io_kind(error) {
        Some(Io::PermissionDenied) => Meaning::Denied("no permission"),
        Some(Io::ReadOnlyFilesystem) => Meaning::Lasting("the file system is read-only"),
        Some(Io::StorageFull) => Meaning::Lasting("the disk is full: free space and run again to go on"),
        Some(Io::QuotaExceeded) => Meaning::Lasting("the disk quota is used up: free space and run again to go on"),
        Some(Io::FileTooLarge) => Meaning::Lasting("the file system takes no file of that size"),
        Some(Io::NotADirectory) => Meaning::Lasting("a part of the path is a file, not a folder"),
        Some(Io::IsADirectory) => Meaning::Lasting("a folder lies there"),
        Some(Io::InvalidFilename) => Meaning::Lasting("not a usable file name"),
        _ => Meaning::Transient,
    }
}

/// The kind of the first I/O error in the chain.
fn io_kind(error: &(dyn std::error::Error + 'static)) -> Option<std::io::ErrorKind> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(io) = error.downcast_ref::<std::io::Error>() {
            return Some(io.kind());
        }
        next = error.source();
    }
    None
}
