//! Safe wrappers of the driver's calls: a card's context with one stream, memory that is freed on
//! drop, functions and launches.
//!
//! All work is issued in order to this stream. A context may be used from any thread: each call
//! makes it current first.

#![expect(unsafe_code, reason = "calls of NVIDIA's driver, a C library")]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::DriverError;
use cudarc::driver::result;
use cudarc::driver::sys::{
    self, CUdevice_attribute_enum as Attribute, CUfunction_attribute_enum as FunctionAttribute, CUresult,
};

use super::libraries;
use super::plan::Launch;
use crate::device::DeviceError;

/// A card's description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    pub name: String,
    /// Compute capability: 89 is 8.9.
    pub capability: u32,
    pub multiprocessors: u32,
    pub memory_bytes: u64,
    /// CUDA version of the driver: 12080 is 12.8.
    pub driver_version: u32,
}

impl Card {
    /// Whether the card has the features that only Hopper has (sm_90a).
    pub fn is_hopper(&self) -> bool {
        self.capability == 90
    }
}

/// Number of cards that this process can see.
///
/// # Errors
/// There is no driver, or it is too old or broken.
pub fn card_count() -> Result<u32, DeviceError> {
    libraries::check_driver()?;
    match result::init() {
        Err(DriverError(CUresult::CUDA_ERROR_NO_DEVICE)) => return Ok(0),
        other => check(other, "starting the driver")?,
    }
    Ok(check(result::device::get_count(), "counting cards")? as u32)
}

/// A card in use.
pub struct Context {
    context: sys::CUcontext,
    stream: sys::CUstream,
    card: Card,
}

// SAFETY: the driver's handles may be used from any thread; each call here makes the context
// current first.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Opens card `ordinal`.
    ///
    /// # Errors
    /// There is no card with this number, the driver is older than CUDA 12.0, or the card is
    /// unusable.
    pub fn open(ordinal: u32) -> Result<Context, DeviceError> {
        let count = card_count()?;
        if count == 0 {
            return Err(DeviceError::NoDevice(format!(
                "there is no `cuda:{ordinal}`: the driver finds no card; compute with `--device cpu`"
            )));
        }
        if ordinal >= count {
            let available = match count {
                1 => "there is `cuda:0` alone".to_string(),
                count => format!("there are `cuda:0` to `cuda:{}`", count - 1),
            };
            return Err(DeviceError::Unavailable(format!(
                "there is no `cuda:{ordinal}`: {available}"
            )));
        }
        let mut version = 0;
        // SAFETY: the driver writes one number to `version`, which outlives the call.
        let result = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
        check(result, "asking for the driver's version")?;
        if version < 12_000 {
            return Err(DeviceError::Unavailable(format!(
                "the NVIDIA driver is of CUDA {}.{}, and 12.0 or later is needed (driver 525): install a newer one, or compute with `--device cpu`",
                version / 1000,
                version % 1000 / 10
            )));
        }
        let device = check(result::device::get(ordinal as i32), "opening the card")?;
        let attribute = |attribute: Attribute| {
            // SAFETY: the driver returned this device.
            let value = unsafe { result::device::get_attribute(device, attribute) };
            Ok::<u32, DeviceError>(check(value, "reading the card's attributes")? as u32)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        // SAFETY: as above.
        let memory = check(
            unsafe { result::device::total_mem(device) },
            "asking for the card's memory",
        )?;
        let card = Card {
            name: check(result::device::get_name(device), "asking for the card's name")?,
            capability: major * 10 + minor,
            multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            memory_bytes: memory as u64,
            driver_version: version as u32,
        };
        // SAFETY: the primary context is retained until the process ends; the stream is made in it.
        let (context, stream) = unsafe {
            let context = check(result::primary_ctx::retain(device), "taking the card")?;
            check(result::ctx::set_current(context), "taking the card")?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
            (context, check(stream, "making a stream")?)
        };
        Ok(Context { context, stream, card })
    }

    pub fn card(&self) -> &Card {
        &self.card
    }

    /// Makes the context current on this thread; every method here does so.
    pub(super) fn make_current(&self) -> Result<(), DeviceError> {
        // SAFETY: the context lives as long as the process.
        check(unsafe { result::ctx::set_current(self.context) }, "using the card")
    }

    /// The stream, for libraries that issue work to it themselves.
    pub(super) fn stream(&self) -> *mut c_void {
        self.stream.cast()
    }

    /// Free memory of the card, in bytes.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        self.make_current()?;
        Ok(check(result::mem_get_info(), "asking for free memory")?.0 as u64)
    }

    /// Allocates memory with undefined content; `what` names it in messages.
    pub fn allocate(self: &Arc<Self>, bytes: usize, what: &str) -> Result<Memory, DeviceError> {
        self.make_current()?;
        // SAFETY: a size of at least 1; the content is written before it is read.
        match unsafe { result::malloc_sync(bytes.max(1)) } {
            Ok(address) => Ok(Memory {
                context: Arc::clone(self),
                address,
                bytes,
            }),
            Err(DriverError(CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let mib = |bytes: u64| bytes.div_ceil(1 << 20);
                let free = self.free_bytes()?;
                Err(DeviceError::OutOfMemory(format!(
                    "{what} takes {} MiB, and {} of the card's {} MiB are free",
                    mib(bytes as u64),
                    mib(free),
                    mib(self.card.memory_bytes)
                )))
            }
            Err(error) => check(Err(error), what),
        }
    }

    /// Allocates memory with a copy of `data`.
    pub fn allocate_copy(self: &Arc<Self>, data: &[u8], what: &str) -> Result<Memory, DeviceError> {
        let memory = self.allocate(data.len(), what)?;
        self.upload(data, &memory, 0)?;
        self.wait()?;
        Ok(memory)
    }

    /// Begins to copy `from` to `to`, starting at byte `offset`. A pinned source must stay
    /// unchanged until the stream has been waited for.
    pub fn upload(&self, from: &[u8], to: &Memory, offset: usize) -> Result<(), DeviceError> {
        assert!(
            offset + from.len() <= to.bytes,
            "{} bytes at {offset} of {}",
            from.len(),
            to.bytes
        );
        if from.is_empty() {
            return Ok(());
        }
        self.make_current()?;
        // SAFETY: within the memory, as asserted. The driver copies pageable memory before it
        // returns.
        let copied = unsafe { result::memcpy_htod_async(to.address + offset as u64, from, self.stream) };
        check(copied, "copying to the card")
    }

    /// Copies bytes of `from`, starting at byte `offset`, to the host after all issued work.
    pub fn download(&self, from: &Memory, offset: usize, to: &mut [u8]) -> Result<(), DeviceError> {
        assert!(
            offset + to.len() <= from.bytes,
            "{} bytes at {offset} of {}",
            to.len(),
            from.bytes
        );
        if !to.is_empty() {
            self.make_current()?;
            // SAFETY: within the memory, as asserted; `to` is not touched before the stream has
            // been waited for.
            let copied = unsafe { result::memcpy_dtoh_async(to, from.address + offset as u64, self.stream) };
            check(copied, "copying from the card")?;
        }
        self.wait()
    }

    /// Begins to copy the first `bytes` of `from` into `to`, starting at byte `offset` of `to`.
    pub fn copy(&self, from: &Memory, to: &Memory, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        assert!(bytes <= from.bytes && offset + bytes <= to.bytes);
        self.make_current()?;
        // SAFETY: within the memories, as asserted.
        let copied = unsafe { result::memcpy_dtod_async(to.address + offset as u64, from.address, bytes, self.stream) };
        check(copied, "copying on the card")
    }

    /// Begins to copy `bytes` bytes within one allocation, from offset `from` to offset `to`.
    pub fn copy_within(&self, memory: &Memory, from: usize, to: usize, bytes: usize) -> Result<(), DeviceError> {
        assert!(from + bytes <= memory.bytes && to + bytes <= memory.bytes);
        self.make_current()?;
        let address = |offset: usize| memory.address + offset as u64;
        // SAFETY: within the memory, as asserted.
        let copied = unsafe { result::memcpy_dtod_async(address(to), address(from), bytes, self.stream) };
        check(copied, "copying on the card")
    }

    /// Waits until all issued work is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.make_current()?;
        // SAFETY: the stream lives as long as the context.
        check(unsafe { result::stream::synchronize(self.stream) }, "computing")
    }

    /// Allocates pinned host memory, which the card reads and writes without the CPU.
    pub fn allocate_pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, DeviceError> {
        self.make_current()?;
        // SAFETY: a size of at least 1; the content is set below.
        let start = check(unsafe { result::malloc_host(bytes.max(1), 0) }, "pinning host memory")?;
        // SAFETY: the memory has this size, and nothing else refers to it.
        unsafe { std::ptr::write_bytes(start.cast::<u8>(), 0, bytes) };
        Ok(Pinned {
            context: Arc::clone(self),
            start: start.cast(),
            bytes,
        })
    }

    /// Begins to copy the first `bytes` of pinned memory to the beginning of `to`.
    pub fn send(self: &Arc<Self>, from: Pinned, bytes: usize, to: &Memory) -> Result<PinnedTransfer, DeviceError> {
        self.upload(&from[..bytes], to, 0)?;
        let done = self.record_event()?;
        Ok(PinnedTransfer { pinned: from, done })
    }

    /// Begins to copy the first `bytes` of `from` to pinned memory, after all issued work.
    pub fn fetch(self: &Arc<Self>, from: &Memory, bytes: usize, mut to: Pinned) -> Result<PinnedTransfer, DeviceError> {
        assert!(bytes <= from.bytes);
        if bytes > 0 {
            self.make_current()?;
            // SAFETY: within both memories; `to` is not read before the event has been waited for.
            let copied = unsafe { result::memcpy_dtoh_async(&mut to[..bytes], from.address, self.stream) };
            check(copied, "copying from the card")?;
        }
        let done = self.record_event()?;
        Ok(PinnedTransfer { pinned: to, done })
    }

    /// Records an event in the stream, which can be waited for.
    pub fn record_event(self: &Arc<Self>) -> Result<StreamEvent, DeviceError> {
        self.make_current()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let recorded = StreamEvent {
            context: Arc::clone(self),
            event: check(event, "creating an event")?,
        };
        // SAFETY: event and stream are of this context.
        let recording = unsafe { result::event::record(recorded.event, self.stream) };
        check(recording, "recording an event").map(|()| recorded)
    }

    /// Tensor map of a matrix on the card.
    ///
    /// # Errors
    /// The driver rejects the shape.
    pub fn tensor_map(&self, shape: &MapShape) -> Result<TensorMap, DeviceError> {
        self.make_current()?;
        TensorMap::new(shape)
    }

    /// Loads the function `name` from machine code, to be run with `shared_bytes` of dynamic shared
    /// memory.
    ///
    /// # Errors
    /// The driver rejects the image.
    pub fn function(&self, image: &[u8], name: &str, shared_bytes: u32) -> Result<Function, DeviceError> {
        self.make_current()?;
        let load_error = |error: DriverError| match error.0 {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_INVALID_IMAGE => {
                DeviceError::Unsupported(format!("kernel `{name}` is not for this card: {}", describe(error)))
            }
            _ => device_error(error, &format!("loading kernel `{name}`")),
        };
        let c_name = std::ffi::CString::new(name)
            .map_err(|_| DeviceError::Unsupported(format!("kernel `{name}` has a zero in its name")))?;
        // The driver reads PTX up to a zero byte.
        let mut image = image.to_vec();
        image.push(0);
        // SAFETY: the image is an ELF file or ends with a zero; the module is never unloaded.
        let function = unsafe {
            let module = result::module::load_data(image.as_ptr().cast()).map_err(load_error)?;
            result::module::get_function(module, c_name).map_err(load_error)?
        };
        let set = |attribute, value| {
            // SAFETY: the function is of a loaded module.
            let set = unsafe { result::function::set_function_attribute(function, attribute, value) };
            check(set, "allowing shared memory")
        };
        // Without this attribute, a thread block has at most 48 KiB.
        if shared_bytes > 48 << 10 {
            set(
                FunctionAttribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                shared_bytes as i32,
            )?;
            // In percent: maximum shared memory, so that as many blocks as fit share a
            // multiprocessor.
            set(
                FunctionAttribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                100,
            )?;
        }
        Ok(Function(function))
    }

    /// Begins to run a function.
    ///
    /// # Safety
    /// The arguments match the function, and point to memory as large as the function accesses.
    pub unsafe fn launch(
        &self,
        function: &Function,
        launch: &Launch,
        arguments: &[Argument],
    ) -> Result<(), DeviceError> {
        self.make_current()?;
        let mut pointers: Vec<*mut c_void> = arguments.iter().map(Argument::pointer).collect();
        // SAFETY: by the caller's contract. The driver copies the arguments before it returns.
        let launched = unsafe {
            let [x, y] = launch.grid;
            let (grid, block) = ((x, y, 1), (launch.threads, 1, 1));
            result::launch_kernel(function.0, grid, block, launch.shared_bytes, self.stream, &mut pointers)
        };
        launched.map_err(|error| device_error(error, &format!("running `{}`", launch.kernel)))
    }
}

/// A kernel's argument.
#[derive(Debug, Clone, Copy)]
pub enum Argument {
    /// An address on the card; 0: null.
    Address(u64),
    Int(i32),
    Word(u32),
    Long(u64),
    Float(f32),
    Map(TensorMap),
}

impl Argument {
    fn pointer(&self) -> *mut c_void {
        fn pointer_to<T>(value: &T) -> *mut c_void {
            std::ptr::from_ref(value).cast_mut().cast()
        }
        match self {
            Argument::Address(value) => pointer_to(value),
            Argument::Int(value) => pointer_to(value),
            Argument::Word(value) => pointer_to(value),
            Argument::Long(value) => pointer_to(value),
            Argument::Float(value) => pointer_to(value),
            Argument::Map(value) => pointer_to(&value.0),
        }
    }
}

/// Tensor map: tells the tensor memory accelerator (TMA) how to address a row-major matrix.
///
/// Aligned to 128 bytes, as CUDA 13 requires; the headers of CUDA 12 say 64.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(128))]
pub struct TensorMap(sys::CUtensorMap);

/// A row-major matrix on the card, from which a [`TensorMap`] is made.
#[derive(Debug, Clone, Copy)]
pub struct MapShape {
    pub address: u64,
    pub rows: usize,
    /// Elements per row.
    pub columns: usize,
    /// Bytes per element: 1, or 2 for BF16.
    pub element_bytes: usize,
    /// Rows per box; each row of a box has 128 bytes.
    pub box_rows: u32,
}

impl TensorMap {
    fn new(shape: &MapShape) -> Result<TensorMap, DeviceError> {
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        let kind = match shape.element_bytes {
            1 => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            _ => sys::CUtensorMapDataType_enum::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        };
        let sizes = [shape.columns as u64, shape.rows as u64];
        let strides = [(shape.columns * shape.element_bytes) as u64];
        let boxes = [(128 / shape.element_bytes) as u32, shape.box_rows];
        let steps = [1u32, 1];
        // SAFETY: the arrays have the lengths that two dimensions require.
        let made = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                kind,
                2,
                shape.address as *mut c_void,
                sizes.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave_enum::CU_TENSOR_MAP_INTERLEAVE_NONE,
                sys::CUtensorMapSwizzle_enum::CU_TENSOR_MAP_SWIZZLE_128B,
                sys::CUtensorMapL2promotion_enum::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                sys::CUtensorMapFloatOOBfill_enum::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(made.result(), "making a tensor map")?;
        Ok(TensorMap(map))
    }
}

/// A kernel on the card.
#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: the driver accepts this handle from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Memory of the card, freed on drop.
pub struct Memory {
    context: Arc<Context>,
    address: u64,
    bytes: usize,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // Issued work may still use the memory. After a failure of the card there is nothing to
        // free.
        if self.context.wait().is_ok() {
            // SAFETY: allocated in this context, and freed once.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Pinned host memory, freed on drop.
pub struct Pinned {
    context: Arc<Context>,
    start: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory, which only this value refers to.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl std::ops::Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory has this size and is initialised.
        unsafe { std::slice::from_raw_parts(self.start, self.bytes) }
    }
}

impl std::ops::DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.bytes) }
    }
}

impl Pinned {
    /// The contents as whole F32 words.
    pub fn as_floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: the driver allocates whole pages, so the start is aligned; any bits are a valid
        // F32; `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), self.bytes / 4) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.wait().is_ok() {
            // SAFETY: allocated in this context, and freed once.
            let _ = unsafe { result::free_host(self.start.cast()) };
        }
    }
}

/// A copy from or to pinned memory that may still run.
pub struct PinnedTransfer {
    // Dropped before the event: `Pinned` waits for the stream before it frees the memory.
    pinned: Pinned,
    /// Recorded after the copy.
    done: StreamEvent,
}

impl PinnedTransfer {
    /// Waits until the copy is done, and returns the memory.
    ///
    /// # Errors
    /// Work that was issued earlier failed.
    pub fn wait(self) -> Result<Pinned, DeviceError> {
        self.done.wait()?;
        Ok(self.pinned)
    }
}

/// An event in the stream.
pub struct StreamEvent {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: the driver accepts this handle from any thread.
unsafe impl Send for StreamEvent {}
// SAFETY: as above.
unsafe impl Sync for StreamEvent {}

impl StreamEvent {
    /// Waits until all work issued before the event is done.
    pub fn wait(&self) -> Result<(), DeviceError> {
        self.context.make_current()?;
        // SAFETY: the event lives as long as this value.
        check(unsafe { result::event::synchronize(self.event) }, "computing")
    }
}

impl Drop for StreamEvent {
    fn drop(&mut self) {
        // SAFETY: destroyed once.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

fn check<T>(result: Result<T, DriverError>, doing: &str) -> Result<T, DeviceError> {
    result.map_err(|error| device_error(error, doing))
}

fn device_error(error: DriverError, doing: &str) -> DeviceError {
    let why = format!("{doing}: {}", describe(error));
    match error.0 {
        CUresult::CUDA_ERROR_OUT_OF_MEMORY => DeviceError::OutOfMemory(why),
        CUresult::CUDA_ERROR_NO_DEVICE
        | CUresult::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        | CUresult::CUDA_ERROR_SYSTEM_NOT_READY
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE => DeviceError::Unavailable(why),
        _ => DeviceError::Lost(why),
    }
}

/// Name and description of an error, from the driver.
fn describe(error: DriverError) -> String {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".into(), |t| t.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(error.error_name()), text(error.error_string()))
}
