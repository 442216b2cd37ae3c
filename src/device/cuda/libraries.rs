//! Finds NVIDIA's libraries, which are loaded at run time. Without them, gristmill prints one clear
//! message, or computes on the CPU.

#![expect(unsafe_code, reason = "loads C libraries at run time")]

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

use crate::device::DeviceError;

/// Environment variable: folders that are searched first, separated by colons. As the system's own
/// loader does, a process with more rights than the user who started it (set-user-ID, file
/// capabilities) ignores all variables that name folders of libraries.
pub const FOLDERS_VARIABLE: &str = "GRISTMILL_CUDA_LIBRARIES";

/// Functions of the driver that this device calls. A driver without one of them is too old.
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

/// Checks that the driver is there and has all functions. This must come first: cudarc, which loads
/// the driver by name, panics if the driver or a function is missing.
///
/// # Errors
/// There is no driver, or it is too old.
pub fn check_driver() -> Result<(), DeviceError> {
    let mut folders = configured_folders();
    folders.push(PathBuf::from("/usr/lib/wsl/lib"));
    let file_names = ["libcuda.so", "libcuda.so.1"];
    let library = folders
        .iter()
        .flat_map(|folder| file_names.iter().map(move |name| folder.join(name)))
        .filter(|path| path.exists())
        .find_map(|path| open(&path))
        .or_else(|| file_names.iter().find_map(|name| open(Path::new(name))));
    let Some(library) = library else {
        return Err(DeviceError::NoDevice(
            "there is no NVIDIA driver here (`libcuda.so.1`): install it, or compute with `--device cpu`".into(),
        ));
    };
    let missing = DRIVER_FUNCTIONS.into_iter().find(|name| {
        // SAFETY: the symbol is only looked up, not used.
        unsafe { library.get::<*const ()>(name.as_bytes()) }.is_err()
    });
    // The library stays open, so that cudarc, which opens it by name, gets this copy.
    std::mem::forget(library);
    if let Some(name) = missing {
        return Err(DeviceError::Unavailable(format!(
            "the NVIDIA driver is too old: it has no `{name}`; install one for CUDA 12.0 or later (525 or later)"
        )));
    }
    Ok(())
}

/// Paths at which there may be a copy of NVRTC, in search order; none has been opened yet.
pub fn nvrtc_candidates() -> Vec<PathBuf> {
    candidates("libnvrtc.so")
}

/// As [`nvrtc_candidates`], for cuBLASLt.
pub fn cublaslt_candidates() -> Vec<PathBuf> {
    candidates("libcublasLt.so")
}

fn candidates(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in configured_folders().into_iter().chain(toolkit_folders()) {
        found.extend(files_with_prefix(&folder, name));
    }
    // Without a folder: the loader's own search path.
    found.extend([".13", ".12", ""].map(|version| PathBuf::from(format!("{name}{version}"))));
    found
}

/// Opens NVRTC at `path`. A copy from pip's package looks for its builtins library by file name
/// only, so the builtins beside it are opened first.
pub fn open_nvrtc(path: &Path) -> Option<Library> {
    if let Some(folder) = path.parent().filter(|folder| folder.is_absolute()) {
        for builtins in files_with_prefix(folder, "libnvrtc-builtins.so") {
            // The builtins stay open until the process ends.
            std::mem::forget(open(&builtins));
        }
    }
    open(path)
}

/// Opens a library; `None` on any error.
pub fn open(path: &Path) -> Option<Library> {
    // SAFETY: the code that NVIDIA's libraries run when they are loaded has no preconditions.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.ok()
}

/// Value of an environment variable that names a folder of libraries or of compiled kernels.
/// `None`: the variable is not set, or this process must not trust it.
pub(super) fn trusted_variable(name: &str) -> Option<OsString> {
    let value = std::env::var_os(name)?;
    let trusted = ProcessRights::own().trusted(value);
    if trusted.is_none() {
        tracing::warn!(
            "`{name}` is ignored: this process has more rights than who started it (set-user-ID or capabilities)"
        );
    }
    trusted
}

/// Rights of a process, compared with those of the user who started it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessRights {
    /// The kernel's `AT_SECURE` flag, which also covers file capabilities.
    is_secure: bool,
    /// Real user and group.
    started_by: (u32, u32),
    /// Effective user and group.
    acts_as: (u32, u32),
}

impl ProcessRights {
    /// Rights of this process.
    fn own() -> ProcessRights {
        // SAFETY: the call reads a number that the kernel set at the start of the process.
        #[cfg(target_os = "linux")]
        let is_secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
        #[cfg(not(target_os = "linux"))]
        let is_secure = false;
        use rustix::process::{getegid, geteuid, getgid, getuid};
        ProcessRights {
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

fn configured_folders() -> Vec<PathBuf> {
    let folders = trusted_variable(FOLDERS_VARIABLE).unwrap_or_default();
    std::env::split_paths(&folders)
        .filter(|path| path.is_absolute())
        .collect()
}

/// Folders in which toolkits, conda and pip install NVIDIA's libraries.
fn toolkit_folders() -> Vec<PathBuf> {
    let mut folders = Vec::new();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(trusted_variable(variable).map(|home| Path::new(&home).join("lib64")));
    }
    folders.push("/usr/local/cuda/lib64".into());
    let installed = entries(Path::new("/usr/local"));
    let versions = installed.into_iter().filter(|path| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with("cuda-"))
    });
    folders.extend(versions.map(|path| path.join("lib64")));
    folders.extend(trusted_variable("CONDA_PREFIX").map(|prefix| Path::new(&prefix).join("lib")));
    if let Some(environment) = trusted_variable("VIRTUAL_ENV") {
        for python in entries(&Path::new(&environment).join("lib")) {
            for package in entries(&python.join("site-packages/nvidia")) {
                folders.push(package.join("lib"));
            }
        }
    }
    folders
}

/// Files of a folder whose names start with `prefix`.
fn files_with_prefix(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let mut found = entries(folder);
    found.retain(|path| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.starts_with(prefix))
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
    fn the_environment_is_ignored_with_more_rights_than_the_user() {
        let plain = ProcessRights {
            is_secure: false,
            started_by: (1000, 100),
            acts_as: (1000, 100),
        };
        let folder = || OsString::from("/home/me/libraries");
        assert_eq!(plain.trusted(folder()), Some(folder()));
        for more in [
            ProcessRights {
                is_secure: true,
                ..plain
            },
            ProcessRights {
                acts_as: (0, 100),
                ..plain
            },
            ProcessRights {
                acts_as: (1000, 0),
                ..plain
            },
        ] {
            assert_eq!(more.trusted(folder()), None, "{more:?}");
        }
        // Tests run with the rights of the user who started them.
        assert_eq!(ProcessRights::own().trusted(folder()), Some(folder()));
    }
}
