//! Classifies the errors of a store: missing object, retryable, or in need of a person.

use super::folder::IrregularFile;
use crate::dataset::store::credentials::NoCredentials;
use crate::dataset::store::error::{chain, find_source};

/// Kinds of store errors, by their consequence for the request.
pub(super) enum StoreErrorKind {
    /// There is no object.
    Missing,
    /// A retry may succeed.
    Transient,
    /// A retry will fail too. The text gives the cause and the remedy.
    Permanent(&'static str),
    /// A retry will fail until a person has given permission or the credentials were renewed.
    Denied(&'static str),
}

/// Classifies `error` by its variant and by the I/O error inside (local folders).
pub(super) fn store_error_kind(error: &object_store::Error) -> StoreErrorKind {
    use object_store::Error as E;
    use std::io::ErrorKind as Io;
    if is_missing_bucket(error) {
        return StoreErrorKind::Permanent("there is no such bucket: make it, or correct the address");
    }
    if find_source::<NoCredentials>(error).is_some() {
        return StoreErrorKind::Denied("no access");
    }
    match error {
        E::NotFound { .. } => return StoreErrorKind::Missing,
        E::PermissionDenied { .. } => return StoreErrorKind::Denied("no permission"),
        E::Unauthenticated { .. } => return StoreErrorKind::Denied("the store does not accept the credentials"),
        E::NotSupported { .. } | E::NotImplemented { .. } => {
            return StoreErrorKind::Permanent(
                "the store cannot do this, and the guarantee needs it: choose another store",
            );
        }
        E::InvalidPath { .. } | E::UnknownConfigurationKey { .. } => {
            return StoreErrorKind::Permanent("not a usable address");
        }
        _ => {}
    }
    match find_source::<IrregularFile>(error) {
        Some(IrregularFile::Link(_)) => {
            return StoreErrorKind::Permanent(
                "symbolic links below an output are not followed: use a real file or folder, or link the whole output",
            );
        }
        Some(IrregularFile::Special(_)) => {
            return StoreErrorKind::Permanent("what lies there was not written by gristmill: remove it");
        }
        None => {}
    }
    match find_source::<std::io::Error>(error).map(std::io::Error::kind) {
        Some(Io::PermissionDenied) => StoreErrorKind::Denied("no permission"),
        Some(Io::ReadOnlyFilesystem) => StoreErrorKind::Permanent("the file system is read-only"),
        Some(Io::StorageFull) => StoreErrorKind::Permanent("the disk is full: free space and run again to go on"),
        Some(Io::QuotaExceeded) => {
            StoreErrorKind::Permanent("the disk quota is used up: free space and run again to go on")
        }
        Some(Io::FileTooLarge) => StoreErrorKind::Permanent("the file system takes no file of that size"),
        Some(Io::NotADirectory) => StoreErrorKind::Permanent("a part of the path is a file, not a folder"),
        Some(Io::IsADirectory) => StoreErrorKind::Permanent("a folder lies there"),
        Some(Io::InvalidFilename) => StoreErrorKind::Permanent("not a usable file name"),
        _ => StoreErrorKind::Transient,
    }
}

/// Whether the bucket is missing. Stores report this in the body of the response, which a response
/// to HEAD lacks.
fn is_missing_bucket(error: &object_store::Error) -> bool {
    use object_store::Error as E;
    let source = match error {
        E::NotFound { source, .. } | E::Generic { source, .. } => source,
        _ => return false,
    };
    chain(source.as_ref()).any(|error| {
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
    fn a_missing_bucket_is_a_permanent_error() {
        let source = |text: &str| Box::new(std::io::Error::other(text.to_string()));
        let generic = |text: &str| object_store::Error::Generic {
            store: "S3",
            source: source(text),
        };
        let missing = |text: &str| object_store::Error::NotFound {
            path: "a".into(),
            source: source(text),
        };
        let is_permanent = |error| matches!(store_error_kind(&error), StoreErrorKind::Permanent(why) if why.contains("no such bucket"));
        assert!(is_permanent(generic(
            "404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"
        )));
        assert!(is_permanent(missing(
            "404 Not Found: <Error><Code>NoSuchBucket</Code></Error>"
        )));
        assert!(!is_permanent(generic("503 Service Unavailable")));
        assert!(matches!(
            store_error_kind(&missing("404: <Code>NoSuchKey</Code>")),
            StoreErrorKind::Missing
        ));
    }
}
