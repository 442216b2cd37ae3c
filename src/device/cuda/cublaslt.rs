//! NVIDIA's matrix products: the yardstick of ours.
//!
//! `y = x W^T` of rows is, in the library's columns, `y = op(W) x` with W transposed: all three matrices lie as they are. It scales
//! E4M3 by row and column on Hopper alone, from CUDA 12.9 on, and INT8 not at all: its sums are scaled in a step of their own.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, Symbol};

use super::driver::{Context, Memory};
use super::libraries;
use super::plan::{Format, LinearShape};
use crate::device::DeviceError;

/// The library, on one card.
pub struct CublasLt {
    context: Arc<Context>,
    library: Library,
    path: PathBuf,
    handle: Handle,
    /// What its products may use besides.
    workspace: Memory,
}

type Status = c_int;
/// Any of the library's objects.
type Object = *mut c_void;

struct Handle(Object);

// SAFETY: the library's handles may be used from any thread; each call makes the card the thread's own first.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Least bytes that NVIDIA advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Ways to compute a product that are looked at.
const ALGORITHMS: usize = 8;

// Numbers of cublasLt.h, cublas_api.h and library_types.h.
const F32: u32 = 0;
const I8: u32 = 3;
const I32: u32 = 10;
const BF16: u32 = 14;
const E4M3: u32 = 28;
const COMPUTE_F32: u32 = 68;
const COMPUTE_I32: u32 = 72;
const TRANSPOSED: u32 = 1;
const EPILOGUE_BIAS: u32 = 4;
const SCALES_OF_OUTER_VECTORS: u32 = 3;
const INVALID_VALUE: Status = 7;
const ARCH_MISMATCH: Status = 8;
const NOT_SUPPORTED: Status = 15;

/// Attributes of a product.
#[derive(Clone, Copy)]
enum Attribute {
    TransposeA = 3,
    Epilogue = 7,
    Bias = 8,
    ScalesA = 17,
    ScalesB = 18,
    ScaleModeA = 31,
    ScaleModeB = 32,
}

/// Of an attribute.
enum Value {
    Word(u32),
    Address(u64),
}

/// Of what a choice of algorithms depends on: how much workspace they may use.
const PREFERENCE_WORKSPACE: u32 = 1;

/// One way to compute a product; the library's own content.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Algorithm([u64; 8]);

/// What the library says of one; `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Found {
    algorithm: Algorithm,
    workspace: usize,
    status: Status,
    waves: f32,
    reserved: [c_int; 4],
}

/// `y = x W^T`, addresses on the card. Sums of INT8 are integers of 32 bits.
#[derive(Clone, Copy)]
pub struct Matrices {
    pub shape: LinearShape,
    pub x: u64,
    pub weight: u64,
    /// Of x's rows and of W's; E4M3 alone.
    pub scales: Option<(u64, u64)>,
    /// BF16; 0: none. Not with INT8.
    pub bias: u64,
    pub y: u64,
    /// Numbers from one row of y to the next.
    pub stride: usize,
}

/// An object of the library, destroyed at the end.
struct Owned<'a> {
    library: &'a CublasLt,
    object: Object,
    destroy: &'static str,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the signature is cublasLt.h's; the object was made and is destroyed once.
        unsafe {
            if let Ok(destroy) = self
                .library
                .function::<unsafe extern "C" fn(Object) -> Status>(self.destroy)
            {
                destroy(self.object);
            }
        }
    }
}

/// A product's description, and those of its matrices.
struct Description<'a> {
    product: Owned<'a>,
    weight: Owned<'a>,
    x: Owned<'a>,
    y: Owned<'a>,
}

impl CublasLt {
    /// A copy of the library that the card's driver takes.
    ///
    /// # Errors
    /// There is none, or no memory for what it needs.
    pub fn open(context: &Arc<Context>) -> Result<CublasLt, DeviceError> {
        let major_max = context.card().driver as usize / 1000;
        let version = |library: &Library| {
            // SAFETY: the signature is cublasLt.h's.
            let version = unsafe {
                library
                    .get::<unsafe extern "C" fn() -> usize>(b"cublasLtGetVersion")
                    .ok()?()
            };
            (version / 10_000 <= major_max).then_some(())
        };
        let found = libraries::cublaslt_candidates().into_iter().find_map(|path| {
            let library = libraries::open(&path)?;
            version(&library)?;
            Some((library, path))
        });
        let Some((library, path)) = found else {
            return Err(DeviceError::Missing(format!(
                "cuBLASLt is missing: install it with `pip install 'nvidia-cublas{}=={major_max}.*'` and set `{}` to its `lib` folder",
                if major_max < 13 { "-cu12" } else { "" },
                libraries::FOLDERS_VARIABLE
            )));
        };
        let mut found = CublasLt {
            workspace: context.take(WORKSPACE_BYTES, "cuBLASLt's workspace")?,
            context: Arc::clone(context),
            library,
            path,
            handle: Handle(std::ptr::null_mut()),
        };
        context.enter()?;
        let mut handle: Object = std::ptr::null_mut();
        // SAFETY: the signature is cublasLt.h's.
        unsafe {
            let create: Symbol<unsafe extern "C" fn(*mut Object) -> Status> = found.function("cublasLtCreate")?;
            found.check(create(&mut handle), "cublasLtCreate")?;
        }
        found.handle = Handle(handle);
        Ok(found)
    }

    /// Where it was found.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ways to compute a product, the most promising first; none: the library does not compute it.
    ///
    /// # Errors
    /// It failed.
    pub fn algorithms(&self, of: &Matrices) -> Result<Vec<Algorithm>, DeviceError> {
        self.context.enter()?;
        let Some(description) = self.describe(of)? else {
            return Ok(vec![]);
        };
        type Choose = unsafe extern "C" fn(
            Object,
            Object,
            Object,
            Object,
            Object,
            Object,
            Object,
            c_int,
            *mut Found,
            *mut c_int,
        ) -> Status;
        let mut found = [Found::default(); ALGORITHMS];
        let mut count: c_int = 0;
        // SAFETY: signatures are cublasLt.h's; all objects are alive, and the array is as long as is said.
        let status = unsafe {
            let create: Symbol<unsafe extern "C" fn(*mut Object) -> Status> =
                self.function("cublasLtMatmulPreferenceCreate")?;
            let mut object: Object = std::ptr::null_mut();
            self.check(create(&mut object), "cublasLtMatmulPreferenceCreate")?;
            let preference = self.own(object, "cublasLtMatmulPreferenceDestroy");
            let bytes = WORKSPACE_BYTES;
            let set: Symbol<unsafe extern "C" fn(Object, u32, *const c_void, usize) -> Status> =
                self.function("cublasLtMatmulPreferenceSetAttribute")?;
            let said = set(
                object,
                PREFERENCE_WORKSPACE,
                std::ptr::from_ref(&bytes).cast(),
                size_of_val(&bytes),
            );
            self.check(said, "cublasLtMatmulPreferenceSetAttribute")?;
            let choose: Symbol<Choose> = self.function("cublasLtMatmulAlgoGetHeuristic")?;
            choose(
                self.handle.0,
                description.product.object,
                description.weight.object,
                description.x.object,
                description.y.object,
                description.y.object,
                preference.object,
                ALGORITHMS as c_int,
                found.as_mut_ptr(),
                &mut count,
            )
        };
        if status == NOT_SUPPORTED {
            return Ok(vec![]);
        }
        self.check(status, "cublasLtMatmulAlgoGetHeuristic")?;
        let found = found
            .iter()
            .take(count.max(0) as usize)
            .filter(|found| found.status == 0);
        Ok(found.map(|found| found.algorithm).collect())
    }

    /// Begins to compute a product in one of [its ways](Self::algorithms), over memory as large as its shapes say.
    ///
    /// # Errors
    /// It failed.
    pub fn multiply(&self, of: &Matrices, algorithm: &Algorithm) -> Result<(), DeviceError> {
        self.context.enter()?;
        let Some(description) = self.describe(of)? else {
            return Err(DeviceError::Unsupported(
                "cuBLASLt does not compute this product".into(),
            ));
        };
        type Multiply = unsafe extern "C" fn(
            Object,
            Object,
            *const c_void,
            u64,
            Object,
            u64,
            Object,
            *const c_void,
            u64,
            Object,
            u64,
            Object,
            *const Algorithm,
            u64,
            usize,
            *mut c_void,
        ) -> Status;
        // One and zero in either type: nothing is added to the product.
        let (one, zero) = match of.shape.format {
            Format::Int8 => (1u32, 0u32),
            _ => (1f32.to_bits(), 0),
        };
        // SAFETY: the signature is cublasLt.h's, addresses of the card being words; the factors are read before it returns; memory is
        // as large as the caller says.
        unsafe {
            let multiply: Symbol<Multiply> = self.function("cublasLtMatmul")?;
            let status = multiply(
                self.handle.0,
                description.product.object,
                std::ptr::from_ref(&one).cast(),
                of.weight,
                description.weight.object,
                of.x,
                description.x.object,
                std::ptr::from_ref(&zero).cast(),
                of.y,
                description.y.object,
                of.y,
                description.y.object,
                algorithm,
                self.workspace.address(),
                WORKSPACE_BYTES,
                self.context.stream(),
            );
            self.check(status, "cublasLtMatmul")
        }
    }

    /// `None`: the library does not know such products, an older one without scales of rows, say.
    fn describe(&self, of: &Matrices) -> Result<Option<Description<'_>>, DeviceError> {
        let LinearShape {
            format,
            rows,
            columns,
            bytes,
            wide,
        } = of.shape;
        let (from, to, compute, scale) = match format {
            Format::Int8 => (I8, I32, COMPUTE_I32, I32),
            Format::E4m3 => (E4M3, BF16, COMPUTE_F32, F32),
            Format::Bf16 => (BF16, BF16, COMPUTE_F32, F32),
        };
        let to = if wide { F32 } else { to };
        // Numbers of a row of x and of W.
        let width = bytes / format.bytes();
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: the signature is cublasLt.h's.
        unsafe {
            let create: Symbol<unsafe extern "C" fn(*mut Object, u32, u32) -> Status> =
                self.function("cublasLtMatmulDescCreate")?;
            self.check(create(&mut object, compute, scale), "cublasLtMatmulDescCreate")?;
        }
        let product = self.own(object, "cublasLtMatmulDescDestroy");
        let mut attributes = vec![(Attribute::TransposeA, Value::Word(TRANSPOSED))];
        if of.bias != 0 {
            attributes.push((Attribute::Epilogue, Value::Word(EPILOGUE_BIAS)));
            attributes.push((Attribute::Bias, Value::Address(of.bias)));
        }
        if let Some((of_rows, of_columns)) = of.scales {
            attributes.push((Attribute::ScaleModeA, Value::Word(SCALES_OF_OUTER_VECTORS)));
            attributes.push((Attribute::ScaleModeB, Value::Word(SCALES_OF_OUTER_VECTORS)));
            attributes.push((Attribute::ScalesA, Value::Address(of_columns)));
            attributes.push((Attribute::ScalesB, Value::Address(of_rows)));
        }
        // SAFETY: the signature is cublasLt.h's; each value has the size that its attribute has there.
        unsafe {
            let set: Symbol<unsafe extern "C" fn(Object, u32, *const c_void, usize) -> Status> =
                self.function("cublasLtMatmulDescSetAttribute")?;
            for (attribute, value) in &attributes {
                let (at, size): (*const c_void, usize) = match value {
                    Value::Word(word) => (std::ptr::from_ref(word).cast(), size_of_val(word)),
                    Value::Address(address) => (std::ptr::from_ref(address).cast(), size_of_val(address)),
                };
                if set(product.object, *attribute as u32, at, size) != 0 {
                    return Ok(None);
                }
            }
        }
        Ok(Some(Description {
            weight: self.matrix(from, width, columns, width)?,
            x: self.matrix(from, width, rows, width)?,
            y: self.matrix(to, columns, rows, of.stride)?,
            product,
        }))
    }

    /// A matrix of columns, so many numbers apart.
    fn matrix(&self, kind: u32, rows: usize, columns: usize, stride: usize) -> Result<Owned<'_>, DeviceError> {
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: the signature is cublasLt.h's.
        unsafe {
            let create: Symbol<unsafe extern "C" fn(*mut Object, u32, u64, u64, i64) -> Status> =
                self.function("cublasLtMatrixLayoutCreate")?;
            let status = create(&mut object, kind, rows as u64, columns as u64, stride as i64);
            self.check(status, "cublasLtMatrixLayoutCreate")?;
        }
        Ok(self.own(object, "cublasLtMatrixLayoutDestroy"))
    }

    fn own(&self, object: Object, destroy: &'static str) -> Owned<'_> {
        Owned {
            library: self,
            object,
            destroy,
        }
    }

    /// # Safety
    /// `T` is the function's signature.
    unsafe fn function<T>(&self, name: &str) -> Result<Symbol<T>, DeviceError> {
        // SAFETY: as the caller vouches.
        unsafe { self.library.get(name.as_bytes()) }
            .map_err(|_| DeviceError::Missing(format!("`{}` has no `{name}`", self.path.display())))
    }

    fn check(&self, status: Status, doing: &str) -> Result<(), DeviceError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the signature is cublasLt.h's; it returns a text that lives as long as the library.
        let why = unsafe {
            match self.function::<unsafe extern "C" fn(Status) -> *const c_char>("cublasLtGetStatusString") {
                Ok(text) => CStr::from_ptr(text(status)).to_string_lossy().into_owned(),
                Err(_) => format!("status {status}"),
            }
        };
        let why = format!("`{doing}` of `{}`: {why}", self.path.display());
        Err(match status {
            INVALID_VALUE | ARCH_MISMATCH | NOT_SUPPORTED => DeviceError::Unsupported(why),
            _ => DeviceError::Lost(why),
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: the signature is cublasLt.h's; the handle, where there is one, was made and is destroyed once.
        unsafe {
            if !self.handle.0.is_null()
                && let Ok(destroy) = self.function::<unsafe extern "C" fn(Object) -> Status>("cublasLtDestroy")
            {
                destroy(self.handle.0);
            }
        }
    }
}
