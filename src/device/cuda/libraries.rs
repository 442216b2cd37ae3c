//! Finds NVIDIA's libraries. They are loaded at run time: without them gristmill prints one clear
//! message, or computes on the CPU.

#![expect(unsafe_code, reason = "loads C libraries at run time")]

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::device::DeviceError;

/// Folders that are searched first, separated by colons. Like all variables that name folders of
/// libraries, it is ignored in a process that has more rights than the user who started it
/// (set-user-ID, file capabilities), as the system's own loader does.
pub const FOLDERS_VARIABLE: &str = "GRISTMILL_CUDA_LIBRARIES";

/// Functions of the driver that this device calls. A driver that lacks one is too old.
const DRIVER_FUNCTIONS: [&str; 26] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuFuncSetAttribute",
    "cuLaunchKernel",
    "cuEventCreate",
    "cuGetErrorString",
    "cuTensorMapEncodeTiled",
];

/// Checks the driver first, because cudarc, which loads it by name, panics where the driver or a
/// function is missing.
///
/// # Errors
/// There is no driver, or it is too old.
pub fn driver() -> Result<(), DeviceError> {
    let mut tried = asked_folders();
    tried.push(PathBuf::from("/usr/lib/wsl/lib"));
    let named = ["libcuda.so", "libcuda.so.1"];
    let library = tried
        .iter()
        .flat_map(|folder| named.iter().map(move |name| folder.join(name)))
        .filter(|path| path.exists())
        .find_map(|path| open(&path))
        .or_else(|| named.iter().find_map(|name| open(Path::new(name))));
    let Some(library) = library else {
        return Err(DeviceError::Absent(
            "there is no NVIDIA driver here (`libcuda.so.1`): install it, or compute with `--device cpu`".into(),
        ));
    };
    let found = DRIVER_FUNCTIONS.into_iter().find(|name| {
        // SAFETY: the symbol is looked up and not used.
        unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err()
    });
    // The library stays open, so that cudarc, which knows only its name, gets this copy.
    std::mem::forget(library);
    if let Some(name) = found {
        return Err(DeviceError::Missing(format!(
            "the NVIDIA driver is too old: it has no `{name}`; install one for CUDA 12.0 or later (525 or later)"
        )));
    }
    Ok(())
}

/// Paths of all copies of NVRTC that were found, by folder; none has been opened yet.
pub fn nvrtc_candidates() -> Vec<PathBuf> {
    candidates("libnvrtc.so")
}

/// As [`nvrtc_candidates`], for cuBLASLt.
pub fn cublaslt_candidates() -> Vec<PathBuf> {
    candidates("libcublasLt.so")
}

fn candidates(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in asked_folders().into_iter().chain(toolkit_folders()) {
        found.extend(named_in(&folder, name));
    }
    // The loader's own search path.
    found.extend([".13", ".12", ""].map(|version| PathBuf::from(format!("{name}{version}"))));
    found
}

/// Opens NVRTC at `path`. The copy of its wheel looks for its builtins by name alone, so they are
/// opened first.
pub fn open_nvrtc(path: &Path) -> Option<Library> {
    if let Some(folder) = path.parent().filter(|folder| folder.is_absolute()) {
        for builtins in named_in(folder, "libnvrtc-builtins.so") {
            // The builtins stay open until the process ends.
            std::mem::forget(open(&builtins));
        }
    }
    open(path)
}

/// Opens a library; `None` on any error.
pub fn open(path: &Path) -> Option<Library> {
    // SAFETY: NVIDIA's libraries run no code on loading that relies on us.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.ok()
}

/// Value of a variable that names a folder of libraries or of compiled kernels, if the environment
/// can be trusted.
pub(super) fn variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    let trusted = Rights::own().trusted(value);
    if trusted.is_none() {
        tracing::warn!(
            "`{name}` is ignored: this process has more rights than who started it (set-user-ID or capabilities)"
        );
    }
    trusted
}

/// Tells whether a process has rights that the user who started it lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rights {
    /// The kernel's `AT_SECURE` flag, which also covers file capabilities.
    is_secure: bool,
    /// Real user and group.
    started_by: (u32, u32),
    /// Effective user and group.
    acts_as: (u32, u32),
}

impl Rights {
    /// Rights of this process.
    fn own() -> Rights {
        // SAFETY: the call reads a number that the kernel set at the start of the process.
        #[cfg(target_os = "linux")]
        let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
        #[cfg(not(target_os = "linux"))]
        let is_secure = false;
        use rustix::process::{getegid, geteuid, getgid, getuid};
        Rights {
            is_secure,
            started_by: (getuid().as_raw(), getgid().as_raw()),
            acts_as: (geteuid().as_raw(), getegid().as_raw()),
        }
    }

    /// The value, if this process has no more rights than the user who set it.
    fn trusted(self, value: OsString) -> Option<OsString> {
        let has_more = self.is_secure || self.started_by != self.acts_as;
        (!has_more).then_some(value)
    }
}

fn asked_folders() -> Vec<PathBuf> {
    let asked = variable(FOLDERS_VARIABLE).unwrap_or_default();
    std::env::split_paths(&asked)
        .filter(|path| path.is_absolute())
        .collect()
}

/// Folders in which toolkits, conda and pip install NVIDIA's libraries.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(self::variable(variable).map(|home| Path::new(&home).join("lib64")));
    }
    folders.push("/usr/local/cuda/lib64".into());
    let versions = entries(Path::new("/usr/local"));
    let versions = versions.into_iter().filter(|path| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("cuda-"))
    });
    folders.extend(versions.map(|path| path.join("lib64")));
    folders.extend(variable("CONDA_PREFIX").map(|prefix| Path::new(&prefix).join("lib")));
    if let Some(environment) = variable("VIRTUAL_ENV") {
        for python in entries(&Path::new(&environment).join("lib")) {
            for package in entries(&python.join("site-packages/nvidia")) {
                folders.push(package.join("lib"));
            }
        }
    }
    folders
}

/// Files of a folder whose names start with `begin`.
fn named_in(folder: &Path, begin: &str) -> Vec<PathBuf> {
    let mut found = entries(folder);
    found.retain(|path| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(begin))
    });
    found
}

/// Entries of a folder, sorted by name; empty if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let read = std::fs::read_dir(folder).into_iter().flatten();
    let mut found: Vec<PathBuf> = read.filter_map(|entry| Some(entry.ok()?.path())).collect();
    found.sort();
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_counts_for_nothing_with_more_rights_than_who_set_it() {
        let plain = Rights {
            is_secure: false,
            started_by: (1000, 100),
            acts_as: (1000, 100),
        };
        let folder = || OsString::from("/home/me/libraries");
        assert_eq!(plain.trusted(folder()), Some(folder()));
        for more in [
            Rights {
                is_secure: true,
                ..plain
            },
            Rights {
                acts_as: (0, 100),
                ..plain
            },
            Rights {
                acts_as: (1000, 0),
                ..plain
            },
        ] {
            assert_eq!(more.trusted(folder()), None, "{more:?}");
        }
        // Tests run with the rights of the user who started them.
        assert_eq!(Rights::own().trusted(folder()), Some(folder()));
    }
}
