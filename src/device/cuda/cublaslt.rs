//! Matrix products by cuBLASLt.
//!
//! The library is column-major: `y = x W^T` over rows is `op(W) x` with W transposed in its terms,
//! so all three matrices are used without a copy. Scales of E4M3 by row and column need Hopper and
//! CUDA 12.9. INT8 products are unscaled: a kernel of their own scales the sums.

#![expect(unsafe_code, reason = "calls of a C library that is loaded at run time")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library, Symbol};

use super::driver::{Context, Memory};
use super::libraries;
use super::plan::{KernelFormat, LinearShape};
use crate::device::DeviceError;

/// cuBLASLt, opened for one card.
pub(super) struct CublasLt {
    context: Arc<Context>,
    functions: Functions,
    path: PathBuf,
    version: usize,
    handle: Handle,
    /// Scratch memory of its products.
    workspace: Memory,
}

type CublasStatus = c_int;
/// Any of the library's objects.
type Object = *mut c_void;
type Create = unsafe extern "C" fn(*mut Object) -> CublasStatus;
type Destroy = unsafe extern "C" fn(Object) -> CublasStatus;
type SetAttribute = unsafe extern "C" fn(Object, u32, *const c_void, usize) -> CublasStatus;
type Choose = unsafe extern "C" fn(
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    Object,
    c_int,
    *mut HeuristicResult,
    *mut c_int,
) -> CublasStatus;
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
) -> CublasStatus;

/// Functions of the library, with the signatures of cublasLt.h. They are looked up once, since a
/// step computes some hundred products.
struct Functions {
    version: unsafe extern "C" fn() -> usize,
    status: unsafe extern "C" fn(CublasStatus) -> *const c_char,
    create: Create,
    destroy: Destroy,
    create_product: unsafe extern "C" fn(*mut Object, u32, u32) -> CublasStatus,
    destroy_product: Destroy,
    set_of_product: SetAttribute,
    create_matrix: unsafe extern "C" fn(*mut Object, u32, u64, u64, i64) -> CublasStatus,
    destroy_matrix: Destroy,
    create_preference: Create,
    destroy_preference: Destroy,
    set_of_preference: SetAttribute,
    choose: Choose,
    multiply: Multiply,
    /// Keeps the library open as long as its functions are used.
    _library: Library,
}

impl Functions {
    /// Looks up all functions; `Err` is the name of a missing one.
    fn of(library: Library) -> Result<Functions, &'static str> {
        // SAFETY: signatures are cublasLt.h's; the library stays open beside its functions.
        unsafe {
            Ok(Functions {
                version: function(&library, "cublasLtGetVersion")?,
                status: function(&library, "cublasLtGetStatusString")?,
                create: function(&library, "cublasLtCreate")?,
                destroy: function(&library, "cublasLtDestroy")?,
                create_product: function(&library, "cublasLtMatmulDescCreate")?,
                destroy_product: function(&library, "cublasLtMatmulDescDestroy")?,
                set_of_product: function(&library, "cublasLtMatmulDescSetAttribute")?,
                create_matrix: function(&library, "cublasLtMatrixLayoutCreate")?,
                destroy_matrix: function(&library, "cublasLtMatrixLayoutDestroy")?,
                create_preference: function(&library, "cublasLtMatmulPreferenceCreate")?,
                destroy_preference: function(&library, "cublasLtMatmulPreferenceDestroy")?,
                set_of_preference: function(&library, "cublasLtMatmulPreferenceSetAttribute")?,
                choose: function(&library, "cublasLtMatmulAlgoGetHeuristic")?,
                multiply: function(&library, "cublasLtMatmul")?,
                _library: library,
            })
        }
    }
}

/// # Safety
/// `T` is the function's signature, and `T` is not called after the library is closed.
unsafe fn function<T: Copy>(library: &Library, name: &'static str) -> Result<T, &'static str> {
    // SAFETY: by the caller's contract.
    let found: Result<Symbol<T>, _> = unsafe { library.get(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| name)
}

struct Handle(Object);

// SAFETY: the library's handles may be used from any thread; each call makes the context current.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

/// Minimum that NVIDIA advises for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of algorithms per product.
const ALGORITHMS: usize = 8;

// Constants of cublasLt.h, cublas_api.h and library_types.h.
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
const ALLOC_FAILED: CublasStatus = 3;
const INVALID_VALUE: CublasStatus = 7;
const ARCH_MISMATCH: CublasStatus = 8;
const NOT_SUPPORTED: CublasStatus = 15;

/// Attributes of a matmul descriptor.
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

/// An attribute's value.
enum Value {
    Word(u32),
    Long(u64),
}

impl Value {
    /// Sets an attribute of `object` by `set`.
    ///
    /// # Safety
    /// `set` accepts objects of this kind, the object is alive, and the attribute's value has this
    /// size.
    unsafe fn set(&self, set: SetAttribute, object: Object, attribute: u32) -> CublasStatus {
        let (at, size): (*const c_void, usize) = match self {
            Value::Word(word) => (std::ptr::from_ref(word).cast(), size_of_val(word)),
            Value::Long(long) => (std::ptr::from_ref(long).cast(), size_of_val(long)),
        };
        // SAFETY: by the caller's contract. The library copies the value before it returns.
        unsafe { set(object, attribute, at, size) }
    }
}

/// Attributes of an algorithm preference: maximum workspace, and allowed types of partial sums.
const PREFERENCE_WORKSPACE: u32 = 1;
const PREFERENCE_REDUCTION: u32 = 3;
/// Partial sums in F32 (or INT32), never in the type that the result is rounded to.
const IN_COMPUTE_TYPE: u32 = 2;
/// First version that scales E4M3 by row and column.
const SCALES_ROWS_FROM: usize = 120_900;

/// An algorithm of a product. The content is opaque; the same version of the library accepts it
/// again from a file.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Algorithm([u64; 8]);

/// The library's description of an algorithm; `cublasLtMatmulHeuristicResult_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct HeuristicResult {
    algorithm: Algorithm,
    workspace: usize,
    status: CublasStatus,
    waves: f32,
    reserved: [c_int; 4],
}

/// Operands of `y = x W^T`, as addresses on the card. Sums of INT8 are 32-bit integers.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    pub shape: LinearShape,
    pub x: u64,
    pub weight: u64,
    /// Scales of x's rows and of W's rows; E4M3 only.
    pub scales: Option<(u64, u64)>,
    /// BF16, or 0 for none; must be 0 with INT8.
    pub bias: u64,
    pub y: u64,
    /// Stride between rows of y, in values.
    pub stride: usize,
}

/// An object of the library, destroyed on drop.
struct Owned<'a> {
    /// The library outlives its objects.
    of: PhantomData<&'a CublasLt>,
    object: Object,
    destroy: Destroy,
}

impl Drop for Owned<'_> {
    fn drop(&mut self) {
        // SAFETY: the object was made and is destroyed once.
        unsafe { (self.destroy)(self.object) };
    }
}

/// Descriptors of a product and of its matrices.
struct Description<'a> {
    product: Owned<'a>,
    weight: Owned<'a>,
    x: Owned<'a>,
    y: Owned<'a>,
}

impl CublasLt {
    /// Opens the newest copy of the library that the card's driver supports.
    ///
    /// # Errors
    /// No such copy was found, or memory for its workspace is lacking.
    pub(super) fn open(context: &Arc<Context>) -> Result<CublasLt, DeviceError> {
        let major_max = context.card().driver as usize / 1000;
        let mut lacking = String::new();
        let mut found: Option<(Functions, usize, PathBuf)> = None;
        for path in libraries::cublaslt_candidates() {
            let Some(library) = libraries::open(&path) else {
                continue;
            };
            match Functions::of(library) {
                Ok(functions) => {
                    // SAFETY: the call has no preconditions.
                    let version = unsafe { (functions.version)() };
                    let newest = found.as_ref().map_or(0, |(_, version, _)| *version);
                    if version / 10_000 <= major_max && version > newest {
                        found = Some((functions, version, path));
                    }
                }
                Err(name) => lacking = format!("; `{}` has no `{name}`", path.display()),
            }
        }
        let Some((functions, version, path)) = found else {
            return Err(DeviceError::Missing(format!(
                "cuBLASLt is missing: install it with `pip install 'nvidia-cublas{}=={major_max}.*'` and set `{}` to its `lib` folder{lacking}",
                if major_max < 13 { "-cu12" } else { "" },
                libraries::FOLDERS_VARIABLE
            )));
        };
        let mut found = CublasLt {
            workspace: context.take(WORKSPACE_BYTES, "cuBLASLt's workspace")?,
            context: Arc::clone(context),
            functions,
            path,
            version,
            handle: Handle(std::ptr::null_mut()),
        };
        context.enter()?;
        let mut handle: Object = std::ptr::null_mut();
        // SAFETY: the handle is written before it returns.
        found.check(unsafe { (found.functions.create)(&mut handle) }, "cublasLtCreate")?;
        found.handle = Handle(handle);
        Ok(found)
    }

    /// The library's version: 120901 is 12.9.1.
    pub(super) fn version(&self) -> usize {
        self.version
    }

    /// The library's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Algorithms for a product, the most promising first; empty where the library does not support
    /// it.
    ///
    /// # Errors
    /// The library failed.
    pub(super) fn algorithms(&self, of: &Matrices) -> Result<Vec<Algorithm>, DeviceError> {
        self.context.enter()?;
        let Some(description) = self.describe(of)? else {
            return Ok(vec![]);
        };
        let mut found = [HeuristicResult::default(); ALGORITHMS];
        let mut count: c_int = 0;
        let Functions {
            create_preference,
            set_of_preference,
            choose,
            ..
        } = self.functions;
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: all objects are alive, and the array has the given length.
        let status = unsafe {
            self.check(create_preference(&mut object), "cublasLtMatmulPreferenceCreate")?;
            let preference = self.own(object, self.functions.destroy_preference);
            for (attribute, value) in [
                (PREFERENCE_WORKSPACE, Value::Long(WORKSPACE_BYTES as u64)),
                (PREFERENCE_REDUCTION, Value::Word(IN_COMPUTE_TYPE)),
            ] {
                let said = value.set(set_of_preference, object, attribute);
                self.check(said, "cublasLtMatmulPreferenceSetAttribute")?;
            }
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

    /// Begins to compute a product by one of its [algorithms](Self::algorithms). Memory must be as
    /// large as the shapes say.
    ///
    /// # Errors
    /// The library failed.
    pub(super) fn multiply(&self, of: &Matrices, algorithm: &Algorithm) -> Result<(), DeviceError> {
        self.context.enter()?;
        let Some(description) = self.describe(of)? else {
            return Err(DeviceError::Unsupported(
                "cuBLASLt does not compute this product".into(),
            ));
        };
        // Alpha is one and beta is zero, in the type of the sums.
        let (one, zero) = match of.shape.format {
            KernelFormat::Int8 => (1u32, 0u32),
            _ => (1f32.to_bits(), 0),
        };
        // SAFETY: addresses of the card are words; the library reads the factors before it returns;
        // the caller vouches for the sizes.
        let status = unsafe {
            (self.functions.multiply)(
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
            )
        };
        self.check(status, "cublasLtMatmul")
    }

    /// `None`: the library does not support such products, for instance an older one without row
    /// scales.
    fn describe(&self, of: &Matrices) -> Result<Option<Description<'_>>, DeviceError> {
        let LinearShape {
            format,
            rows,
            columns,
            bytes,
            wide,
        } = of.shape;
        let (from, to, compute, scale) = match format {
            KernelFormat::Int8 => (I8, I32, COMPUTE_I32, I32),
            KernelFormat::E4m3 => (E4M3, BF16, COMPUTE_F32, F32),
            KernelFormat::Bf16 => (BF16, BF16, COMPUTE_F32, F32),
        };
        let to = if wide { F32 } else { to };
        let scales_rows = self.version >= SCALES_ROWS_FROM && self.context.card().is_hopper();
        if of.scales.is_some() && !scales_rows {
            return Ok(None);
        }
        // Values per row of x and of W.
        let width = bytes / format.bytes();
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: the object is written before it returns.
        let status = unsafe { (self.functions.create_product)(&mut object, compute, scale) };
        self.check(status, "cublasLtMatmulDescCreate")?;
        let product = self.own(object, self.functions.destroy_product);
        let mut attributes = vec![(Attribute::TransposeA, Value::Word(TRANSPOSED))];
        if of.bias != 0 {
            attributes.push((Attribute::Epilogue, Value::Word(EPILOGUE_BIAS)));
            attributes.push((Attribute::Bias, Value::Long(of.bias)));
        }
        if let Some((of_rows, of_columns)) = of.scales {
            attributes.push((Attribute::ScaleModeA, Value::Word(SCALES_OF_OUTER_VECTORS)));
            attributes.push((Attribute::ScaleModeB, Value::Word(SCALES_OF_OUTER_VECTORS)));
            attributes.push((Attribute::ScalesA, Value::Long(of_columns)));
            attributes.push((Attribute::ScalesB, Value::Long(of_rows)));
        }
        for (attribute, value) in &attributes {
            // SAFETY: the value has the size that its attribute has in cublasLt.h.
            if unsafe { value.set(self.functions.set_of_product, product.object, *attribute as u32) } != 0 {
                return Ok(None);
            }
        }
        Ok(Some(Description {
            weight: self.matrix(from, width, columns, width)?,
            x: self.matrix(from, width, rows, width)?,
            y: self.matrix(to, columns, rows, of.stride)?,
            product,
        }))
    }

    /// Layout of a column-major matrix with `stride` values between columns.
    fn matrix(&self, kind: u32, rows: usize, columns: usize, stride: usize) -> Result<Owned<'_>, DeviceError> {
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: the object is written before it returns.
        let status =
            unsafe { (self.functions.create_matrix)(&mut object, kind, rows as u64, columns as u64, stride as i64) };
        self.check(status, "cublasLtMatrixLayoutCreate")?;
        Ok(self.own(object, self.functions.destroy_matrix))
    }

    fn own(&self, object: Object, destroy: Destroy) -> Owned<'_> {
        Owned {
            of: PhantomData,
            object,
            destroy,
        }
    }

    fn check(&self, status: CublasStatus, doing: &str) -> Result<(), DeviceError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the returned text lives as long as the library.
        let why = unsafe { CStr::from_ptr((self.functions.status)(status)) }.to_string_lossy();
        let why = format!("`{doing}` of `{}`: {why}", self.path.display());
        Err(match status {
            ALLOC_FAILED => DeviceError::OutOfMemory(why),
            INVALID_VALUE | ARCH_MISMATCH | NOT_SUPPORTED => DeviceError::Unsupported(why),
            // For an algorithm that does not fit, the library has been seen to report an internal
            // error. A card that still answers is therefore not lost.
            _ => match self.context.wait() {
                Ok(()) => DeviceError::Unsupported(why),
                Err(_) => DeviceError::Lost(why),
            },
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // Products may still run; after a failed wait none does.
        let _ = self.context.wait();
        if !self.handle.0.is_null() {
            // SAFETY: the handle was made and is destroyed once.
            unsafe { (self.functions.destroy)(self.handle.0) };
        }
    }
}
