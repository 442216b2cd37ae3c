//! NVIDIA's matrix products.
//!
//! `y = x W^T` of rows is, in the library's columns, `y = op(W) x` with W transposed: all three matrices lie as they are. It scales
//! E4M3 by row and column on Hopper alone, from CUDA 12.9 on, and INT8 not at all: its sums are scaled in a step of their own.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::marker::PhantomData;
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
    functions: Functions,
    path: PathBuf,
    version: usize,
    handle: Handle,
    /// What its products may use besides.
    workspace: Memory,
}

type Status = c_int;
/// Any of the library's objects.
type Object = *mut c_void;
type Create = unsafe extern "C" fn(*mut Object) -> Status;
type Destroy = unsafe extern "C" fn(Object) -> Status;
type SetAttribute = unsafe extern "C" fn(Object, u32, *const c_void, usize) -> Status;
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

/// What is called of the library, by cublasLt.h's signatures: a step multiplies some hundred times, and looks up no names.
struct Functions {
    version: unsafe extern "C" fn() -> usize,
    status: unsafe extern "C" fn(Status) -> *const c_char,
    create: Create,
    destroy: Destroy,
    create_product: unsafe extern "C" fn(*mut Object, u32, u32) -> Status,
    destroy_product: Destroy,
    set_of_product: SetAttribute,
    create_matrix: unsafe extern "C" fn(*mut Object, u32, u64, u64, i64) -> Status,
    destroy_matrix: Destroy,
    create_preference: Create,
    destroy_preference: Destroy,
    set_of_preference: SetAttribute,
    choose: Choose,
    multiply: Multiply,
    /// Open for as long as they are.
    _library: Library,
}

impl Functions {
    /// `Err`: the name that it lacks.
    fn of(library: Library) -> Result<Functions, &'static str> {
        // SAFETY: signatures are cublasLt.h's; the library stays open beside what is taken from it.
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
/// `T` is the function's signature, and is not called when the library is closed.
unsafe fn function<T: Copy>(library: &Library, name: &'static str) -> Result<T, &'static str> {
    // SAFETY: as the caller vouches.
    let found: Result<Symbol<T>, _> = unsafe { library.get(name.as_bytes()) };
    found.map(|symbol| *symbol).map_err(|_| name)
}

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
const ALLOC_FAILED: Status = 3;
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
    Long(u64),
}

impl Value {
    /// Sets an attribute of `object` by `set`.
    ///
    /// # Safety
    /// The object is one of those that `set` takes, and alive; the attribute has a value of this size.
    unsafe fn set(&self, set: SetAttribute, object: Object, attribute: u32) -> Status {
        let (at, size): (*const c_void, usize) = match self {
            Value::Word(word) => (std::ptr::from_ref(word).cast(), size_of_val(word)),
            Value::Long(long) => (std::ptr::from_ref(long).cast(), size_of_val(long)),
        };
        // SAFETY: as the caller vouches; the value is read before it returns.
        unsafe { set(object, attribute, at, size) }
    }
}

/// Of what a choice of algorithms depends on: how much workspace they may use, and what parts of sums may be kept in.
const PREFERENCE_WORKSPACE: u32 = 1;
const PREFERENCE_REDUCTION: u32 = 3;
/// Parts of sums in F32 (or INT32), never in what the result is rounded to.
const IN_COMPUTE_TYPE: u32 = 2;
/// The first version that scales E4M3 by row and column.
const SCALES_ROWS_FROM: usize = 120_900;

/// One way to compute a product; the library's own content, which its version takes back from a file.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
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
    /// The library outlives them.
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

/// A product's description, and those of its matrices.
struct Description<'a> {
    product: Owned<'a>,
    weight: Owned<'a>,
    x: Owned<'a>,
    y: Owned<'a>,
}

impl CublasLt {
    /// The newest copy of the library that the card's driver takes.
    ///
    /// # Errors
    /// There is none, or no memory for what it needs.
    pub fn open(context: &Arc<Context>) -> Result<CublasLt, DeviceError> {
        let major_max = context.card().driver as usize / 1000;
        let mut lacking = String::new();
        let mut found: Option<(Functions, usize, PathBuf)> = None;
        for path in libraries::cublaslt_candidates() {
            let Some(library) = libraries::open(&path) else {
                continue;
            };
            match Functions::of(library) {
                Ok(functions) => {
                    // SAFETY: it has no conditions.
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

    /// Its version: 120901 is 12.9.1.
    pub fn version(&self) -> usize {
        self.version
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
        let mut found = [Found::default(); ALGORITHMS];
        let mut count: c_int = 0;
        let Functions {
            create_preference,
            set_of_preference,
            choose,
            ..
        } = self.functions;
        let mut object: Object = std::ptr::null_mut();
        // SAFETY: all objects are alive, and the array is as long as is said.
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
        // One and zero in either type: nothing is added to the product.
        let (one, zero) = match of.shape.format {
            Format::Int8 => (1u32, 0u32),
            _ => (1f32.to_bits(), 0),
        };
        // SAFETY: addresses of the card are words; the factors are read before it returns; memory is as large as the caller says.
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
        let scales_rows = self.version >= SCALES_ROWS_FROM && self.context.card().is_hopper();
        if of.scales.is_some() && !scales_rows {
            return Ok(None);
        }
        // Numbers of a row of x and of W.
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

    /// A matrix of columns, so many numbers apart.
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

    fn check(&self, status: Status, doing: &str) -> Result<(), DeviceError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: it returns a text that lives as long as the library.
        let why = unsafe { CStr::from_ptr((self.functions.status)(status)) }.to_string_lossy();
        let why = format!("`{doing}` of `{}`: {why}", self.path.display());
        Err(match status {
            ALLOC_FAILED => DeviceError::OutOfMemory(why),
            INVALID_VALUE | ARCH_MISMATCH | NOT_SUPPORTED => DeviceError::Unsupported(why),
            // An algorithm that does not fit has been seen to say that something went wrong inside: a card that still answers is not lost.
            _ => match self.context.wait() {
                Ok(()) => DeviceError::Unsupported(why),
                Err(_) => DeviceError::Lost(why),
            },
        })
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // Products may still run. Where waiting fails, they do not.
        let _ = self.context.wait();
        if !self.handle.0.is_null() {
            // SAFETY: the handle was made and is destroyed once.
            unsafe { (self.functions.destroy)(self.handle.0) };
        }
    }
}
