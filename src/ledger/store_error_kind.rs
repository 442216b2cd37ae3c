//! Classifies the errors of a store: missing object, retryable, or in need of a person.

use super::folder::IrregularFile;
use crate::dataset::store::credentials::NoCredentials;
use crate::dataset::store::error::{chain, found};

/// The consequence of a store error for its request.
pub(super) enum StoreErrorKind {
    /// There is no object.
    Missing,
    /// A retry may succeed.
    Transient,
    /// A retry will fail too. The text gives the cause and the remedy.
    Lasting(&'static str),
    /// A retry will fail until a person has given permission or the credentials were renewed.
    Denied(&'static str),
}

/// Classifies `error` by its variant and by the I/O error inside (local folders).
pub(super) fn store_error_kind(error: &object_store::Error) -> StoreErrorKind {
    use object_store::Error as E;
    use std::io::ErrorKind as Io;
    if names_no_bucket(error) {
        return StoreErrorKind::Lasting("there is no such bucket: make it, or correct the address");
    }
    if found::<NoCredentials>(error).is_some() {
        return StoreErrorKind::Denied("no access");
    }
    match error {
        E::NotFound { .. } => return StoreErrorKind::Missing,
        E::PermissionDenied { .. } => return StoreErrorKind::Denied("no permission"),
        E::Unauthenticated { .. } => return StoreErrorKind::Denied("the store does not accept the credentials"),
        E::NotSupported { .. } | E::NotImplemented { .. } => {
            return StoreErrorKind::Lasting(
                "the store cannot do this, and the guarantee needs it: choose another store",
            );
        }
        E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => {
            return StoreErrorKind::Lasting("not a usable address");
        }
        _ => {}
    }
    match found::<IrregularFile>(error) {
        Some(IrregularFile::Link(_)) => {
            return StoreErrorKind::Lasting(
                "symbolic links below an output are not followed: use a real file or folder, or link the whole output",
            );
        }
        Some(IrregularFile::Special(_)) => {
            return StoreErrorKind::Lasting("what lies there was not written by gristmill: remove it");
        }
        None => {}
    }
    match found::<std::io::Error>(error).map(std::io::Error::kind) {
        Some(Io::PermissionDenied) => StoreErrorKind::Denied("no permission"),
        Some(Io::ReadOnlyFilesystem) => StoreErrorKind::Lasting("the file system is read-only"),
        Some(Io::StorageFull) => StoreErrorKind::Lasting("the disk is full: free space and run again to go on"),
        Some(Io::QuotaExceeded) => {
            StoreErrorKind::Lasting("the disk quota is used up: free space and run again to go on")
        }
        Some(Io::FileTooLarge) => StoreErrorKind::Lasting("the file system takes no file of that size"),
        Some(Io::NotADirectory) => StoreErrorKind::Lasting("a part of the path is a file, not a folder"),
        Some(Io::IsADirectory) => StoreErrorKind::Lasting("a folder lies there"),
        Some(Io::InvalidFilename) => StoreErrorKind::Lasting("not a usable file name"),
        _ => StoreErrorKind::Transient,
    }
}

/// Whether the bucket is missing. Stores tell this in the body of the response, which a response to
/// HEAD lacks.
fn names_no_bucket(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    let said = match error {
        E::NotFound { source, .. } | E::Generic { source, .. } => source,
        _ => return false,
    };
    chain(said.as_ref()).any(|error| {
        let text = error.to_string();
        [
            "NoSuchBucket",
            "ContainerNotFound",
            "The specified bucket does not exist",
        ]
        .iter()
        .any(|word| text.contains(word))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_that_is_not_there_is_not_waited_for() {
        let said = |text: &str| Box::new(std::io::Error::other(text.to_string()));
        let generic = |text: &str| object_store::Error::Generic {
            store: "S3",
            source: said(text),
        };
        let missing = |text: &str| object_store::Error::NotFound {
            path: "a".into(),
            source: said(text),
        };
        let is_lasting =
            |error| matches!(store_error_kind(&error), StoreErrorKind::Lasting(why) if why.contains("no such bucket"));
        assert!(is_lasting(generic(
            "404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"
        )));
        assert!(is_lasting(missing(
            "404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"
        )));
        assert!(!is_lasting(generic("503 Service Unavailable")));
        assert!(matches!(
            store_error_kind(&missing("404: <Code>NoSuchKey</Code>")),
            StoreErrorKind::Missing
        ));
    }
}
