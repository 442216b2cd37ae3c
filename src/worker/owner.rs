//! Whether a local job's record belongs to this process's own user, or to root, and so is trusted
//! like the operator's own options.
//!
//! Other users can neither have written nor placed such a record, and anyone who can act as that
//! user has the worker's access already.

use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Permission bits: other users may write; in a folder, only an entry's owner may rename it.
const WRITABLE_BY_OTHERS: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Checks that the job's record below `output`, a path without links, can only be from the worker's
/// own user or root.
///
/// # Errors
/// The reason why not, as the end of a line that begins with the output's name.
pub(super) fn check_owner(output: &Path) -> Result<(), String> {
    let ledger = output.join("_gristmill");
    let record = ledger.join("job.json");
    for (path, what) in [(output, "folder"), (&ledger, "ledger"), (&record, "record")] {
        let found = match std::fs::symlink_metadata(path) {
            Ok(found) => found,
            // Other users cannot put a ledger into a folder that belongs to this user.
            Err(error) if error.kind() == ErrorKind::NotFound && path != output => return Ok(()),
            Err(error) => return Err(format!("has a {what} that cannot be looked at ({})", error.kind())),
        };
        check_entry(&found, what)?;
        let is_expected_kind = match what {
            "record" => found.is_file(),
            _ => found.is_dir(),
        };
        if !is_expected_kind {
            return Err(format!("has a {what} that is a link, or of another kind than expected"));
        }
    }
    Ok(())
}

fn check_entry(found: &Metadata, what: &str) -> Result<(), String> {
    let own = rustix::process::geteuid().as_raw();
    if found.uid() != own && found.uid() != 0 {
        return Err(format!(
            "has a {what} of user {}, this worker runs as user {own}",
            found.uid()
        ));
    }
    let is_open_to_others = found.mode() & WRITABLE_BY_OTHERS != 0 && !(found.is_dir() && found.mode() & STICKY != 0);
    if is_open_to_others && !found.is_symlink() {
        Err(format!("has a {what} that every user of this machine may write to"))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_record_that_others_could_have_written_is_not_the_operators() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out");
        let (ledger, record) = (output.join("_gristmill"), output.join("_gristmill/job.json"));
        assert!(check_owner(&output).unwrap_err().contains("folder"), "it is not there");
        fs::create_dir(&output).unwrap();
        assert_eq!(
            check_owner(&output),
            Ok(()),
            "without a ledger there is nothing to forge"
        );
        fs::create_dir(&ledger).unwrap();
        fs::write(&record, "{}").unwrap();
        // A group's members are the operator's choice (many systems give each user a group of his
        // own).
        for path in [&output, &ledger] {
            mode(path, 0o775);
        }
        mode(&record, 0o664);
        assert_eq!(check_owner(&output), Ok(()));
        for (path, bad, good) in [
            (&output, 0o777, 0o755),
            (&ledger, 0o777, 0o755),
            (&record, 0o666, 0o644),
        ] {
            mode(path, bad);
            assert!(check_owner(&output).unwrap_err().contains("may write"), "{path:?}");
            mode(path, good);
        }
        mode(&output, 0o1777);
        assert_eq!(check_owner(&output), Ok(()), "nobody else can rename what lies there");
        fs::rename(&record, folder.path().join("elsewhere")).unwrap();
        symlink(folder.path().join("elsewhere"), &record).unwrap();
        assert!(check_owner(&output).unwrap_err().contains("link"));
        fs::remove_file(&record).unwrap();
        fs::rename(&ledger, folder.path().join("ledger")).unwrap();
        symlink(folder.path().join("ledger"), &ledger).unwrap();
        assert!(check_owner(&output).unwrap_err().contains("link"));
    }

    /// Only root can make files of another user.
    #[test]
    fn a_record_of_another_user_is_a_strangers() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("out");
        fs::create_dir_all(output.join("_gristmill")).unwrap();
        let record = output.join("_gristmill/job.json");
        fs::write(&record, "{}").unwrap();
        if std::os::unix::fs::chown(&record, Some(12_345), None).is_err() {
            return;
        }
        let why = check_owner(&output).unwrap_err();
        assert!(why.contains("of user 12345"), "{why}");
    }
}
