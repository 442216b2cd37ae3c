//! NVRTC, NVIDIA's run-time compiler: compiles the kernels' sources to machine code for the card in
//! use.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::PathBuf;

use libloading::os::unix::{Library, Symbol};

use super::libraries;
use crate::device::DeviceError;

/// A copy of NVRTC.
pub struct Nvrtc {
    library: Library,
    path: PathBuf,
    /// (major, minor).
    version: (u32, u32),
}

type NvrtcStatus = c_int;
type ProgramHandle = *mut c_void;

/// Result of a compilation.
pub struct Compiled {
    /// A cubin, or PTX if NVRTC has no machine code for the card.
    pub image: Vec<u8>,
    /// The assembler's messages: registers, stack, spills.
    pub log: String,
}

impl Nvrtc {
    /// Opens the newest copy that is no newer than the driver. If there is none, opens a copy of
    /// the driver's major version, whose machine code the driver accepts, too.
    ///
    /// # Errors
    /// There is no such copy.
    pub fn find(driver: (u32, u32)) -> Result<Nvrtc, DeviceError> {
        let major_max = driver.0;
        let mut best: Option<Nvrtc> = None;
        // Copies that are newer than the driver rank below all others.
        let rank = |version: (u32, u32)| (version <= driver, version);
        let mut newer_major = None;
        for path in libraries::nvrtc_candidates() {
            let Some(found) = Nvrtc::open(path) else {
                continue;
            };
            if found.version.0 > major_max {
                newer_major = Some(found.version.0);
            } else if best
                .as_ref()
                .is_none_or(|best| rank(best.version) < rank(found.version))
            {
                best = Some(found);
            }
        }
        best.ok_or_else(|| {
            let advice = format!(
                "install it with `pip install 'nvidia-cuda-nvrtc{}=={major_max}.*'` and set `{}` to its `lib` folder, or compute with `--device cpu`",
                if major_max < 13 { "-cu12" } else { "" },
                libraries::FOLDERS_VARIABLE
            );
            DeviceError::Unavailable(match newer_major {
                Some(major) => format!("NVRTC here is of CUDA {major}, and the driver of {major_max}: {advice}"),
                None => format!("NVRTC, which compiles the kernels, is missing: {advice}"),
            })
        })
    }

    /// Opens the copy at `path`; `None`: the file is not a copy of NVRTC.
    pub fn open(path: PathBuf) -> Option<Nvrtc> {
        let library = libraries::open_nvrtc(&path)?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the signature is NVRTC's (nvrtc.h).
        let status = unsafe {
            let version: Symbol<unsafe extern "C" fn(*mut c_int, *mut c_int) -> NvrtcStatus> =
                library.get(b"nvrtcVersion").ok()?;
            version(&mut major, &mut minor)
        };
        (status == 0).then_some(Nvrtc {
            library,
            path,
            version: (major as u32, minor as u32),
        })
    }

    /// (major, minor).
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Compute capabilities, such as 80 or 90, that this NVRTC can compile machine code for,
    /// ascending.
    ///
    /// # Errors
    /// A call of NVRTC failed.
    pub fn architectures(&self) -> Result<Vec<u32>, DeviceError> {
        let mut count: c_int = 0;
        // SAFETY: the signatures are NVRTC's; the array has the length that NVRTC returned.
        unsafe {
            let get_count: Symbol<unsafe extern "C" fn(*mut c_int) -> NvrtcStatus> =
                self.function("nvrtcGetNumSupportedArchs")?;
            self.check(get_count(&mut count), "nvrtcGetNumSupportedArchs")?;
            let mut architectures = vec![0 as c_int; count.max(0) as usize];
            let get_all: Symbol<unsafe extern "C" fn(*mut c_int) -> NvrtcStatus> =
                self.function("nvrtcGetSupportedArchs")?;
            self.check(get_all(architectures.as_mut_ptr()), "nvrtcGetSupportedArchs")?;
            Ok(architectures.into_iter().map(|arch| arch as u32).collect())
        }
    }

    /// Compiles `source` with `headers` (name, text) and `options`; messages call it `name`.
    ///
    /// # Errors
    /// The compiler's messages, which name file and line.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Compiled, DeviceError> {
        let c_string = |text: &str| {
            CString::new(text).map_err(|_| DeviceError::Unsupported(format!("kernel `{name}` holds a zero byte")))
        };
        let (source, source_name) = (c_string(source)?, c_string(name)?);
        let texts = headers
            .iter()
            .map(|(_, t)| c_string(t))
            .collect::<Result<Vec<_>, _>>()?;
        let names = headers
            .iter()
            .map(|(n, _)| c_string(n))
            .collect::<Result<Vec<_>, _>>()?;
        let options = options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>, _>>()?;
        let pointers = |texts: &[CString]| -> Vec<*const c_char> { texts.iter().map(|t| t.as_ptr()).collect() };
        let (text_pointers, name_pointers, option_pointers) = (pointers(&texts), pointers(&names), pointers(&options));
        type Create = unsafe extern "C" fn(
            *mut ProgramHandle,
            *const c_char,
            *const c_char,
            c_int,
            *const *const c_char,
            *const *const c_char,
        ) -> NvrtcStatus;
        let mut program: ProgramHandle = std::ptr::null_mut();
        // SAFETY: the signatures are NVRTC's; all texts end with a zero and outlive the program.
        unsafe {
            let create: Symbol<Create> = self.function("nvrtcCreateProgram")?;
            let created = create(
                &mut program,
                source.as_ptr(),
                source_name.as_ptr(),
                headers.len() as c_int,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            );
            self.check(created, "nvrtcCreateProgram")?;
            let compiled = self.run(program, name, &option_pointers);
            let destroy: Symbol<unsafe extern "C" fn(*mut ProgramHandle) -> NvrtcStatus> =
                self.function("nvrtcDestroyProgram")?;
            destroy(&mut program);
            compiled
        }
    }

    /// # Safety
    /// `program` has been created and not yet destroyed; `options` point to zero-terminated texts.
    unsafe fn run(
        &self,
        program: ProgramHandle,
        name: &str,
        options: &[*const c_char],
    ) -> Result<Compiled, DeviceError> {
        // SAFETY: the signatures are NVRTC's; the caller vouches for the program.
        unsafe {
            let compile: Symbol<unsafe extern "C" fn(ProgramHandle, c_int, *const *const c_char) -> NvrtcStatus> =
                self.function("nvrtcCompileProgram")?;
            let status = compile(program, options.len() as c_int, options.as_ptr());
            let log = self.output(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")?;
            let log = String::from_utf8_lossy(&log).trim_end_matches('\0').trim().to_owned();
            if status != 0 {
                let why = if log.is_empty() { self.describe(status) } else { log };
                return Err(DeviceError::Unsupported(format!(
                    "kernel `{name}` does not compile with NVRTC {}.{}: {why}",
                    self.version.0, self.version.1
                )));
            }
            let mut image = self.output(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN")?;
            if image.is_empty() {
                image = self.output(program, "nvrtcGetPTXSize", "nvrtcGetPTX")?;
            }
            Ok(Compiled { image, log })
        }
    }

    /// # Safety
    /// As [`run`](Self::run); the two names are a matching pair of functions.
    unsafe fn output(
        &self,
        program: ProgramHandle,
        size_function: &str,
        read_function: &str,
    ) -> Result<Vec<u8>, DeviceError> {
        // SAFETY: the signatures are NVRTC's; the buffer has the size that NVRTC returned.
        unsafe {
            let get_size: Symbol<unsafe extern "C" fn(ProgramHandle, *mut usize) -> NvrtcStatus> =
                self.function(size_function)?;
            let mut length = 0usize;
            self.check(get_size(program, &mut length), size_function)?;
            let mut out = vec![0u8; length];
            if length > 0 {
                let read: Symbol<unsafe extern "C" fn(ProgramHandle, *mut c_char) -> NvrtcStatus> =
                    self.function(read_function)?;
                self.check(read(program, out.as_mut_ptr().cast()), read_function)?;
            }
            Ok(out)
        }
    }

    /// # Safety
    /// `T` is the function's signature.
    unsafe fn function<T>(&self, name: &str) -> Result<Symbol<T>, DeviceError> {
        // SAFETY: by the caller's contract.
        unsafe { self.library.get(name.as_bytes()) }.map_err(|_| {
            DeviceError::Unavailable(format!(
                "`{}` has no `{name}`: install NVRTC of CUDA 12.0 or later",
                self.path.display()
            ))
        })
    }

    fn check(&self, status: NvrtcStatus, doing: &str) -> Result<(), DeviceError> {
        match status {
            0 => Ok(()),
            _ => Err(DeviceError::Unsupported(format!(
                "`{doing}` failed: {}",
                self.describe(status)
            ))),
        }
    }

    fn describe(&self, status: NvrtcStatus) -> String {
        // SAFETY: the signature is NVRTC's; the returned text lives as long as the library.
        unsafe {
            match self.function::<unsafe extern "C" fn(NvrtcStatus) -> *const c_char>("nvrtcGetErrorString") {
                Ok(text) => CStr::from_ptr(text(status)).to_string_lossy().into_owned(),
                Err(_) => format!("status {status}"),
            }
        }
    }
}
