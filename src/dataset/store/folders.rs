//! Lists the direct subfolders of a location page by page. Objects in the location are dropped
//! page by page, since an output may have a million parts.

use std::path::Path as FsPath;

use object_store::list::PaginatedListOptions;

use super::clients::Stores;
use super::location::Location;

/// A page of subfolders.
#[derive(Debug, Default)]
pub struct Page {
    pub folders: Vec<Location>,
    /// Number of further folders whose keys no URL can express.
    pub unaddressable: u64,
    /// Token of the next page; `None` on the last page.
    pub next_token: Option<String>,
}

impl Page {
    fn add(&mut self, folder: Option<Location>) {
        match folder {
            Some(folder) => self.folders.push(folder),
            None => self.unaddressable += 1,
        }
    }
}

/// The page for `token`, or the first page if `token` is `None`. Symbolic links in a local folder
/// are skipped.
pub async fn list_page(location: &Location, token: Option<String>) -> object_store::Result<Page> {
    if let Some(folder) = location.local_path() {
        let read = tokio::task::spawn_blocking(move || local_page(&folder)).await?;
        return read.map_err(|error| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(error),
        });
    }
    let mut page = Page::default();
    let found = match Stores::of_process().paginated(&location.url) {
        Some(store) => {
            let key = location.path.as_ref();
            let prefix = (!key.is_empty()).then(|| format!("{key}/"));
            let options = PaginatedListOptions {
                delimiter: Some("/".into()),
                page_token: token,
                ..PaginatedListOptions::default()
            };
            let found = store.list_paginated(prefix.as_deref(), options).await?;
            page.next_token = found.page_token;
            found.result
        }
        None => location.store.list_with_delimiter(Some(&location.path)).await?,
    };
    for folder in &found.common_prefixes {
        page.add(location.location_of_key(folder));
    }
    Ok(page)
}

fn local_page(folder: &FsPath) -> std::io::Result<Page> {
    let mut page = Page::default();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            let path = entry.path();
            page.add(
                path.to_str()
                    .and_then(|path| Location::parse(path, FsPath::new("/")).ok()),
            );
        }
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_local_page_has_only_folders() {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        std::fs::create_dir(at("50% #a")).unwrap();
        std::fs::create_dir(at("b")).unwrap();
        std::fs::write(at("part-00000.parquet"), "x").unwrap();
        std::os::unix::fs::symlink("/", at("link")).unwrap();
        let location = Location::parse(home.path().to_str().unwrap(), FsPath::new("/")).unwrap();
        let found = list_page(&location, None).await.unwrap();
        let mut folders: Vec<_> = found.folders.iter().filter_map(Location::local_path).collect();
        folders.sort();
        assert_eq!(folders, [at("50% #a"), at("b")]);
        assert_eq!((found.unaddressable, found.next_token), (0, None));
        let gone = Location::parse(at("gone").to_str().unwrap(), FsPath::new("/")).unwrap();
        assert!(list_page(&gone, None).await.is_err());
    }
}
