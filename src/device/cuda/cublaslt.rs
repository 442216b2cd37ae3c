//! Bindings of cuBLASLt's matmul.
//!
//! The library is column-major. The row-major `y = x W^T` is its column-major `op(W) x` with `op`
//! transposing W, so all three matrices are used without a copy. Scales of E4M3 by row and column
//! need Hopper and CUDA 12.9. INT8 matmuls return INT32 accumulators, which another kernel scales.

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
    /// Scratch memory of matmuls.
    workspace: Memory,
}

type CublasStatus = c_int;
/// Pointer to any of the library's objects.
type Object = *mut c_void;
type Create = unsafe extern "C" fn(*mut Object) -> CublasStatus;
type Destroy = unsafe extern "C" fn(Object) -> CublasStatus;
type SetAttribute = unsafe extern "C" fn(Object, u32, *const c_void, usize) -> CublasStatus;
type GetHeuristic = unsafe extern "C" fn(
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
type Matmul = unsafe extern "C" fn(
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

/// Functions of the library, with the signatures of cublasLt.h. They are looked up once, because a
/// step computes some hundred matmuls.
struct Functions {
    version: unsafe extern "C" fn() -> usize,
    status: unsafe extern "C" fn(CublasStatus) -> *const c_char,
    create: Create,
    destroy: Destroy,
    create_matmul: unsafe extern "C" fn(*mut Object, u32, u32) -> CublasStatus,
    destroy_matmul: Destroy,
    set_matmul_attribute: SetAttribute,
    create_layout: unsafe extern "C" fn(*mut Object, u32, u64, u64, i64) -> CublasStatus,
    destroy_layout: Destroy,
    create_preference: Create,
    destroy_preference: Destroy,
    set_preference_attribute: SetAttribute,
    get_heuristic: GetHeuristic,
    matmul: Matmul,
    /// Keeps the library open as long as its functions are used.
    _library: Library,
}

impl Functions {
    /// Looks up all functions; `Err` is the name of a missing one.
    fn of(library: Library) -> Result<Functions, &'static str> {
        // SAFETY: the signatures are cublasLt.h's; the library stays open as long as its functions.
        unsafe {
            Ok(Functions {
                version: function(&library, "cublasLtGetVersion")?,
                status: function(&library, "cublasLtGetStatusString")?,
                create: function(&library, "cublasLtCreate")?,
                destroy: function(&library, "cublasLtDestroy")?,
                create_matmul: function(&library, "cublasLtMatmulDescCreate")?,
                destroy_matmul: function(&library, "cublasLtMatmulDescDestroy")?,
                set_matmul_attribute: function(&library, "cublasLtMatmulDescSetAttribute")?,
                create_layout: function(&library, "cublasLtMatrixLayoutCreate")?,
                destroy_layout: function(&library, "cublasLtMatrixLayoutDestroy")?,
                create_preference: function(&library, "cublasLtMatmulPreferenceCreate")?,
                destroy_preference: function(&library, "cublasLtMatmulPreferenceDestroy")?,
                set_preference_attribute: function(&library, "cublasLtMatmulPreferenceSetAttribute")?,
                get_heuristic: function(&library, "cublasLtMatmulAlgoGetHeuristic")?,
                matmul: function(&library, "cublasLtMatmul")?,
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

/// Minimum that NVIDIA recommends for Hopper.
const WORKSPACE_BYTES: usize = 32 << 20;
/// Maximum number of algorithms per matmul.
const ALGORITHMS_MAX: usize = 8;

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
const SCALE_MODE_OUTER_VECTOR: u32 = 3;
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
enum AttributeValue {
    Word(u32),
    Long(u64),
}

impl AttributeValue {
    /// Sets an attribute of `object` with the function `set`.
    ///
    /// # Safety
    /// `set` accepts objects of this kind, the object has not been destroyed, and this is the size
    /// of the attribute's value.
    unsafe fn set(&self, set: SetAttribute, object: Object, attribute: u32) -> CublasStatus {
        let (value, size): (*const c_void, usize) = match self {
            AttributeValue::Word(word) => (std::ptr::from_ref(word).cast(), size_of_val(word)),
            AttributeValue::Long(long) => (std::ptr::from_ref(long).cast(), size_of_val(long)),
        };
        // SAFETY: by the caller's contract. The library copies the value before it returns.
        unsafe { set(object, attribute, value, size) }
    }
}

/// Attributes of an algorithm preference: maximum workspace, and how split-K partial sums may be
/// reduced.
const PREFERENCE_WORKSPACE: u32 = 1;
const PREFERENCE_REDUCTION: u32 = 3;
/// Partial sums are F32 (or INT32), never the type of the result.
const REDUCTION_COMPUTE_TYPE: u32 = 2;
/// First version that scales E4M3 by row and column.
const ROW_SCALES_VERSION_MIN: usize = 120_900;

/// An algorithm for a matmul. The content is opaque; it may be kept in a file for the same version
/// of the library.
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

/// Operands of `y = x W^T`, as addresses on the card. With INT8, y is INT32.
#[derive(Clone, Copy)]
pub(super) struct Matrices {
    pub shape: LinearShape,
    pub x: u64,
    pub weight: u64,
    /// Scales of x's rows and of W's rows; none for BF16. cuBLASLt takes them only for E4M3.
    pub scales: Option<(u64, u64)>,
    /// In BF16; 0: no bias. cuBLASLt takes none with INT8.
    pub bias: u64,
    pub y: u64,
    /// Stride between rows of y, in values.
    pub stride: usize,
}

/// An object of the library, destroyed on drop.
struct LibraryObject<'a> {
    /// The library outlives its objects.
    library: PhantomData<&'a CublasLt>,
    object: Object,
    destroy: Destroy,
}

impl Drop for LibraryObject<'_> {
    fn drop(&mut self) {
        // SAFETY: the object was created, and is destroyed once.
        unsafe { (self.destroy)(self.object) };
    }
}

/// Descriptors of a matmul and of its matrices.
struct MatmulDescriptors<'a> {
    matmul: LibraryObject<'a>,
    weight: LibraryObject<'a>,
    x: LibraryObject<'a>,
    y: LibraryObject<'a>,
}

impl CublasLt {
    /// Opens the newest copy of the library that the card's driver supports.
    ///
    /// # Errors
    /// No such copy was found, or there is no memory for its workspace.
    pub(super) fn open(context: &Arc<Context>) -> Result<CublasLt, DeviceError> {
        let major_max = context.card().driver_version as usize / 1000;
        let mut missing_function = String::new();
        let mut best: Option<(Functions, usize, PathBuf)> = None;
        for path in libraries::cublaslt_candidates() {
            let Some(library) = libraries::open(&path) else {
                continue;
            };
            match Functions::of(library) {
                Ok(functions) => {
                    // SAFETY: the call has no preconditions.
                    let version = unsafe { (functions.version)() };
                    let newest = best.as_ref().map_or(0, |(_, version, _)| *version);
                    if version / 10_000 <= major_max && version > newest {
                        best = Some((functions, version, path));
                    }
                }
                Err(name) => missing_function = format!("; `{}` has no `{name}`", path.display()),
            }
        }
        let Some((functions, version, path)) = best else {
            return Err(DeviceError::Unavailable(format!(
                "cuBLASLt is missing: install it with `pip install 'nvidia-cublas{}=={major_max}.*'` and set `{}` to its `lib` folder{missing_function}",
                if major_max < 13 { "-cu12" } else { "" },
                libraries::FOLDERS_VARIABLE
            )));
        };
        let mut opened = CublasLt {
            workspace: context.allocate(WORKSPACE_BYTES, "cuBLASLt's workspace")?,
            context: Arc::clone(context),
            functions,
            path,
            version,
            handle: Handle(std::ptr::null_mut()),
        };
        context.make_current()?;
        let mut handle: Object = std::ptr::null_mut();
        // SAFETY: the call writes the handle.
        opened.check(unsafe { (opened.functions.create)(&mut handle) }, "cublasLtCreate")?;
        opened.handle = Handle(handle);
        Ok(opened)
    }

    /// The library's version: 120901 is 12.9.1.
    pub(super) fn version(&self) -> usize {
        self.version
    }

    /// The library's path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Algorithms for a matmul, the most promising first; empty if the library does not support it.
    ///
    /// # Errors
    /// The library failed.
    pub(super) fn algorithms(&self, matrices: &Matrices) -> Result<Vec<Algorithm>, DeviceError> {
        self.context.make_current()?;
        let Some(descriptors) = self.describe(matrices)? else {
            return Ok(vec![]);
        };
        let mut found = [HeuristicResult::default(); ALGORITHMS_MAX];
        let mut count: c_int = 0;
        let Functions {
            create_preference,
            set_preference_attribute,
            get_heuristic,
            ..
        } = self.functions;
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: no object has been destroyed, and the array has the given length.
        let status = unsafe {
            self.check(create_preference(&mut object), "cublasLtMatmulPreferenceCreate")?;
            let preference = self.own(object, self.functions.destroy_preference);
            for (attribute, value) in [
                (PREFERENCE_WORKSPACE, AttributeValue::Long(WORKSPACE_BYTES as u64)),
                (PREFERENCE_REDUCTION, AttributeValue::Word(REDUCTION_COMPUTE_TYPE)),
            ] {
                let status = value.set(set_preference_attribute, object, attribute);
                self.check(status, "cublasLtMatmulPreferenceSetAttribute")?;
            }
            get_heuristic(
                self.handle.0,
                descriptors.matmul.object,
                descriptors.weight.object,
                descriptors.x.object,
                descriptors.y.object,
                descriptors.y.object,
                preference.object,
                ALGORITHMS_MAX as c_int,
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

    /// Begins to compute a matmul with one of its [algorithms](Self::algorithms). The matrices'
    /// memory must be as large as their shapes.
    ///
    /// # Errors
    /// The library failed.
    pub(super) fn multiply(&self, matrices: &Matrices, algorithm: &Algorithm) -> Result<(), DeviceError> {
        self.context.make_current()?;
        let Some(descriptors) = self.describe(matrices)? else {
            return Err(DeviceError::Unsupported(
                "cuBLASLt does not support a matmul of this shape".into(),
            ));
        };
        // Alpha is one and beta is zero, in the type of the accumulators.
        let (one, zero) = match matrices.shape.format {
            KernelFormat::Int8 => (1u32, 0u32),
            _ => (1f32.to_bits(), 0),
        };
        // SAFETY: addresses on the card are integers; the library reads `one` and `zero` before it
        // returns; the caller vouches for the sizes.
        let status = unsafe {
            (self.functions.matmul)(
                self.handle.0,
                descriptors.matmul.object,
                std::ptr::from_ref(&one).cast(),
                matrices.weight,
                descriptors.weight.object,
                matrices.x,
                descriptors.x.object,
                std::ptr::from_ref(&zero).cast(),
                matrices.y,
                descriptors.y.object,
                matrices.y,
                descriptors.y.object,
                algorithm,
                self.workspace.address(),
                WORKSPACE_BYTES,
                self.context.stream(),
            )
        };
        self.check(status, "cublasLtMatmul")
    }

    /// `None`: the library does not support such matmuls; for instance, an older version has no row
    /// scales.
    fn describe(&self, matrices: &Matrices) -> Result<Option<MatmulDescriptors<'_>>, DeviceError> {
        let LinearShape {
            format,
            rows,
            columns,
            row_bytes,
            f32_output,
        } = matrices.shape;
        let (input_type, output_type, compute_type, scale_type) = match format {
            KernelFormat::Int8 => (I8, I32, COMPUTE_I32, I32),
            KernelFormat::E4m3 => (E4M3, BF16, COMPUTE_F32, F32),
            KernelFormat::Bf16 => (BF16, BF16, COMPUTE_F32, F32),
            KernelFormat::F32 => return Ok(None),
        };
        let output_type = if f32_output { F32 } else { output_type };
        let supports_row_scales = self.version >= ROW_SCALES_VERSION_MIN && self.context.card().is_hopper();
        if matrices.scales.is_some() && !supports_row_scales {
            return Ok(None);
        }
        // Values per row of x and of W.
        let width = row_bytes / format.bytes();
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: the call writes the object.
        let status = unsafe { (self.functions.create_matmul)(&mut object, compute_type, scale_type) };
        self.check(status, "cublasLtMatmulDescCreate")?;
        let matmul = self.own(object, self.functions.destroy_matmul);
        let mut attributes = vec![(Attribute::TransposeA, AttributeValue::Word(TRANSPOSED))];
        if matrices.bias != 0 {
            attributes.push((Attribute::Epilogue, AttributeValue::Word(EPILOGUE_BIAS)));
            attributes.push((Attribute::Bias, AttributeValue::Long(matrices.bias)));
        }
        if let Some((x_scales, weight_scales)) = matrices.scales {
            attributes.push((Attribute::ScaleModeA, AttributeValue::Word(SCALE_MODE_OUTER_VECTOR)));
            attributes.push((Attribute::ScaleModeB, AttributeValue::Word(SCALE_MODE_OUTER_VECTOR)));
            attributes.push((Attribute::ScalesA, AttributeValue::Long(weight_scales)));
            attributes.push((Attribute::ScalesB, AttributeValue::Long(x_scales)));
        }
        for (attribute, value) in &attributes {
            // SAFETY: the value has the attribute's size in cublasLt.h.
            if unsafe { value.set(self.functions.set_matmul_attribute, matmul.object, *attribute as u32) } != 0 {
                return Ok(None);
            }
        }
        Ok(Some(MatmulDescriptors {
            weight: self.layout(input_type, width, columns, width)?,
            x: self.layout(input_type, width, rows, width)?,
            y: self.layout(output_type, columns, rows, matrices.stride)?,
            matmul,
        }))
    }

    /// Layout of a column-major matrix whose columns begin `stride` values apart.
    fn layout(
        &self,
        value_type: u32,
        rows: usize,
        columns: usize,
        stride: usize,
    ) -> Result<LibraryObject<'_>, DeviceError> {
        let mut object: Object = std::ptr::null_mut();
        let (rows, columns, stride) = (rows as u64, columns as u64, stride as i64);
        // SAFETY: the call writes the object.
        let status = unsafe { (self.functions.create_layout)(&mut object, value_type, rows, columns, stride) };
        self.check(status, "cublasLtMatrixLayoutCreate")?;
        Ok(self.own(object, self.functions.destroy_layout))
    }

    fn own(&self, object: Object, destroy: Destroy) -> LibraryObject<'_> {
        LibraryObject {
            library: PhantomData,
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
            // The library has been seen to report an internal error for an unsuitable algorithm. So
            // the card is lost only if waiting for it fails, too.
            _ => match self.context.wait() {
                Ok(()) => DeviceError::Unsupported(why),
                Err(_) => DeviceError::Lost(why),
            },
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // Matmuls may still run. If waiting fails, none does.
        let _ = self.context.wait();
        if !self.handle.0.is_null() {
            // SAFETY: the handle was created, and is destroyed once.
            unsafe { (self.functions.destroy)(self.handle.0) };
        }
    }
}
