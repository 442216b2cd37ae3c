//! Links, pipes and modes in a local output.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::sync::Arc;

use bytes::Bytes;
use object_store::ObjectStoreExt;
use object_store::local::LocalFileSystem;

use super::*;
use crate::dataset::store::location::Location;
use crate::ledger::keys::{JOB, TMP};
use crate::ledger::store::{CreateOutcome, MAX_OBJECT_BYTES, Retry, Store};

/// A folder with an output, and beside it a folder with one old file that nothing may touch.
struct Scene {
    dir: tempfile::TempDir,
    location: Location,
    store: Store,
}

const CANARY: &str = "0123456789abcdef0123-7";

fn scene() -> Scene {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("outside")).unwrap();
    let canary = dir.path().join("outside").join(CANARY);
    std::fs::write(&canary, "canary").unwrap();
    let old = SystemTime::now() - Duration::from_secs(7200);
    File::options()
        .write(true)
        .open(&canary)
        .unwrap()
        .set_modified(old)
        .unwrap();
    let location = Location::parse("out", dir.path()).unwrap();
    let quick = Retry {
        tries: 2,
        first_delay: Duration::ZERO,
        max_delay: Duration::ZERO,
    };
    let store = Store::with_retry(&location, quick).unwrap();
    Scene { dir, location, store }
}

impl Scene {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Links `out/NAME` to `target` beside the output.
    fn link(&self, name: &str, target: &str) {
        let link = self.path("out").join(name);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        symlink(self.path(target), link).unwrap();
    }

    fn assert_untouched(&self, of: &str) {
        let outside: Vec<_> = std::fs::read_dir(self.path("outside"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(outside, [CANARY], "{of}");
        let canary = std::fs::read_to_string(self.path("outside").join(CANARY)).unwrap();
        assert_eq!(canary, "canary", "{of}");
    }
}

fn assert_link(result: crate::ledger::Result<impl fmt::Debug>, of: &str) {
    let error = result.expect_err(of).to_string();
    assert!(
        error.contains("is a symbolic link") && error.lines().count() == 1,
        "{of}: {error}"
    );
}

#[tokio::test]
async fn no_folder_that_is_a_link_is_passed_through() {
    for at in ["_gristmill", "_gristmill/tmp", "_gristmill/spend"] {
        let scene = scene();
        scene.link(at, "outside");
        let below = format!("{at}/{CANARY}");
        let store = &scene.store;
        assert_link(store.get(&below, 100).await, at);
        assert_link(store.object_version(&below).await, at);
        assert_link(store.list(at).await, at);
        assert_link(store.list_folder(at).await, at);
        assert_link(store.create(&format!("{at}/new"), Bytes::from("x")).await, at);
        assert_link(store.replace(&below, Bytes::from("x")).await, at);
        assert_link(store.delete_all([below].into_iter()).await, at);
        if at != "_gristmill/spend" {
            assert_link(store.remove_old_stages().await, at);
            assert_link(store.check().await, at);
        }
        scene.assert_untouched(at);
    }
}

#[tokio::test]
async fn no_file_that_is_a_link_is_read_written_or_replaced() {
    for (at, target) in [
        ("part-00000.parquet", format!("outside/{CANARY}")),
        ("_SUCCESS", "outside/new".to_string()),
        ("_gristmill/job.json", format!("outside/{CANARY}")),
        ("_gristmill/spend/w.json", "outside/new".to_string()),
    ] {
        let scene = scene();
        scene.link(at, &target);
        let store = &scene.store;
        assert_link(store.get(at, 100).await, at);
        assert_link(store.create(at, Bytes::from("x")).await, at);
        assert_link(store.replace(at, Bytes::from("x")).await, at);
        let listed = store
            .list_folder(at.rsplit_once('/').map_or("", |(above, _)| above))
            .await
            .unwrap();
        assert!(listed.0.iter().any(|object| object.key == at), "{at}");
        // Only the link is removed.
        store.delete_all([at.to_string()].into_iter()).await.unwrap();
        assert!(!scene.path("out").join(at).is_symlink(), "{at}");
        scene.assert_untouched(at);
    }
}

#[tokio::test]
async fn an_exchange_follows_neither_its_lock_nor_its_target() {
    let scene = scene();
    let store = &scene.store;
    store.create("part", Bytes::from("first")).await.unwrap();
    let (_, read) = store.get_versioned("part", MAX_OBJECT_BYTES).await.unwrap().unwrap();
    scene.link("_gristmill/tmp/lock", "outside/new");
    let look: crate::ledger::store::Precheck = &|| Box::pin(async { Ok(()) });
    assert_link(
        store.conditional_put("part", &read, Bytes::from("second"), look).await,
        "lock",
    );
    std::fs::remove_file(scene.path("out/_gristmill/tmp/lock")).unwrap();
    std::fs::remove_file(scene.path("out/part")).unwrap();
    scene.link("part", &format!("outside/{CANARY}"));
    assert_link(
        store.conditional_put("part", &read, Bytes::from("second"), look).await,
        "target",
    );
    scene.assert_untouched("exchange");
}

/// People often link an output to a large disk.
#[tokio::test]
async fn the_output_itself_and_folders_above_it_may_be_links() {
    let scene = scene();
    std::fs::create_dir_all(scene.path("disk/large")).unwrap();
    symlink(scene.path("disk/large"), scene.path("out")).unwrap();
    symlink(scene.path("disk"), scene.path("above")).unwrap();
    let below = Location::parse("above/large/deeper", scene.dir.path()).unwrap();
    for store in [scene.store.clone(), Store::new(&below).unwrap()] {
        store.check().await.unwrap();
        assert_eq!(
            store.create("_gristmill/x", Bytes::from("x")).await.unwrap(),
            CreateOutcome::Ours
        );
        assert_eq!(store.get("_gristmill/x", 10).await.unwrap().unwrap(), "x");
        assert_eq!(store.list("_gristmill").await.unwrap().len(), 1);
    }
    assert!(scene.path("disk/large/_gristmill/x").is_file());
    assert!(scene.path("disk/large/deeper/_gristmill/x").is_file());
}

#[tokio::test]
async fn pipes_and_folders_in_place_of_files_are_refused_at_once() {
    let scene = scene();
    let store = &scene.store;
    let made = scene.path("out/_gristmill/tmp");
    std::fs::create_dir_all(&made).unwrap();
    for name in ["part", "_gristmill/tmp/lock", "_SUCCESS"] {
        crate::regular::make_pipe(&scene.path("out").join(name));
    }
    for key in ["part", "_SUCCESS"] {
        for error in [
            store.get(key, 10).await.unwrap_err(),
            store.create(key, Bytes::from("x")).await.unwrap_err(),
        ] {
            assert!(error.to_string().contains("is no regular file"), "{error}");
        }
    }
    store.create("whole", Bytes::from("first")).await.unwrap();
    let (_, read) = store.get_versioned("whole", MAX_OBJECT_BYTES).await.unwrap().unwrap();
    let look: crate::ledger::store::Precheck = &|| Box::pin(async { Ok(()) });
    let error = store
        .conditional_put("whole", &read, Bytes::from("x"), look)
        .await
        .unwrap_err();
    assert!(error.to_string().contains("lock` is no regular file"), "{error}");
}

#[tokio::test]
async fn files_have_the_mode_that_the_umask_leaves_and_job_json_is_its_owners() {
    let scene = scene();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = status.lines().find_map(|line| line.strip_prefix("Umask:")).unwrap();
    let umask = u32::from_str_radix(umask.trim(), 8).unwrap();
    let mode = |name: &str| {
        std::fs::metadata(scene.path("out").join(name))
            .unwrap()
            .permissions()
            .mode()
            & 0o777
    };
    for key in ["part-00000.parquet", JOB, "_gristmill/commits/0.json"] {
        scene.store.create(key, Bytes::from("{}")).await.unwrap();
    }
    scene
        .store
        .replace("_gristmill/spend/w.json", Bytes::from("{}"))
        .await
        .unwrap();
    assert_eq!(mode(JOB), 0o600 & !umask);
    for name in [
        "part-00000.parquet",
        "_gristmill/commits/0.json",
        "_gristmill/spend/w.json",
    ] {
        assert_eq!(mode(name), 0o666 & !umask, "{name}");
    }
    assert_eq!(mode("_gristmill"), 0o777 & !umask);
}

/// The ETags must not change, because records of earlier versions hold them.
#[tokio::test]
async fn an_object_is_described_as_object_store_describes_files() {
    let scene = scene();
    scene.store.create("part", Bytes::from("12345")).await.unwrap();
    let theirs: Arc<dyn ObjectStore> = Arc::new(LocalFileSystem::new());
    let path = scene.location.path.clone().join("part");
    let (ours, theirs) = (
        Store::object_store(&scene.location).head(&path).await.unwrap(),
        theirs.head(&path).await.unwrap(),
    );
    assert_eq!(ours, theirs);
    let bytes = Store::object_store(&scene.location)
        .get_range(&path, 1..3)
        .await
        .unwrap();
    assert_eq!(bytes, "23");
}

#[tokio::test]
async fn only_old_stages_are_removed() {
    let scene = scene();
    let tmp = scene.path("out").join(TMP);
    std::fs::create_dir_all(&tmp).unwrap();
    let write = |name: &str, hours: u64| {
        let file = File::create(tmp.join(name)).unwrap();
        file.set_modified(SystemTime::now() - Duration::from_secs(hours * 3600))
            .unwrap();
    };
    for (name, hours) in [
        (CANARY, 3),
        ("0123456789abcdef0123-8", 0),
        ("thesis.tex", 9),
        ("lock", 9),
    ] {
        write(name, hours);
    }
    scene.link("_gristmill/tmp/0123456789abcdef0123-9", &format!("outside/{CANARY}"));
    scene.store.remove_old_stages().await.unwrap();
    let mut left: Vec<_> = std::fs::read_dir(&tmp)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(
        left,
        ["0123456789abcdef0123-8", "0123456789abcdef0123-9", "lock", "thesis.tex"]
    );
    scene.assert_untouched("stages");
}
