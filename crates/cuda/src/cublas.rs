//! cuBLASLt, NVIDIA's library of matrix products, bound at the first product where there is one. The few functions that
//! are used are declared here (cublasLt.h of CUDA 12 and 13, which agree in them); without the library, the project's
//! own kernels do the work.
//!
//! An algorithm is chosen by the library's heuristics once for each [`Gemm`], so that equal shapes give equal bits;
//! those that would add partial sums up in the output's dtype are ruled out. f32 is summed in f32 from f32, never
//! TF32.

use crate::device::Gpu;
use libloading::Library;
use retape_core::{DType, Error, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr::null_mut;
use std::sync::{Mutex, OnceLock};

/// Names the library, instead of those below; `none` goes without.
const VARIABLE: &str = "RETAPE_CUBLASLT";
const NAMES: [&str; 3] = ["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
/// Device memory that algorithms may use between them.
const WORKSPACE: usize = 32 << 20;

/// out (+)= alpha a b, column by column: a is m x k, b k x n, out m x n, `batch` times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Gemm {
    pub a: Operand,
    pub b: Operand,
    pub out: Operand,
    pub m: i64,
    pub n: i64,
    pub k: i64,
    pub batch: i64,
}

/// How a matrix lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    pub dtype: DType,
    /// Row by row instead of column by column.
    pub transposed: bool,
    /// Elements from one column (row) to the next.
    pub ld: i64,
    /// Elements from one matrix of the batch to the next.
    pub batch_stride: i64,
    /// Bytes that every matrix's address is a multiple of.
    pub alignment: u32,
}

/// The library, if there is one; found at the first product.
#[derive(Debug, Default)]
pub(crate) struct CublasLt {
    loaded: OnceLock<Option<Loaded>>,
    /// One thread at a time finds it.
    loading: Mutex<()>,
}

impl CublasLt {
    /// Queues the product for each triple of addresses of a, b and out. False where there is no library, or it has no
    /// algorithm for this.
    pub fn run(
        &self,
        gpu: &Gpu,
        gemm: &Gemm,
        addresses: impl Iterator<Item = [u64; 3]>,
        alpha: f64,
        accumulate: bool,
    ) -> Result<bool> {
        match self.loaded(gpu)? {
            Some(loaded) => loaded.run(gpu, gemm, addresses, alpha, accumulate),
            None => Ok(false),
        }
    }

    fn loaded(&self, gpu: &Gpu) -> Result<Option<&Loaded>> {
        if self.loaded.get().is_none() {
            let _one = self.loading.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            if self.loaded.get().is_none() {
                let loaded = Loaded::new(gpu)?;
                self.loaded.get_or_init(|| loaded);
            }
        }
        Ok(self.loaded.get().and_then(Option::as_ref))
    }

    /// Device memory that it holds.
    pub fn scratch_bytes(&self) -> u64 {
        self.loaded.get().and_then(Option::as_ref).map_or(0, |_| WORKSPACE as u64)
    }

    /// Gives back what it holds.
    pub fn close(&mut self, gpu: &Gpu) {
        let Some(Some(loaded)) = self.loaded.take() else { return };
        if gpu.enter().is_ok() {
            for plan in
                loaded.plans.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner()).into_values().flatten()
            {
                loaded.functions.forget(&plan);
            }
            // SAFETY: the handle is used no more. A failure leaves nothing to do.
            unsafe { (loaded.functions.destroy)(loaded.handle) };
        }
        gpu.release(loaded.workspace);
    }
}

type Handle = *mut c_void;
/// `cublasStatus_t`; 0 is success.
type Status = i32;

const SUCCESS: Status = 0;
// cudaDataType
const R_32F: i32 = 0;
const R_64F: i32 = 1;
const R_16F: i32 = 2;
const R_16BF: i32 = 14;
// cublasComputeType_t
const COMPUTE_32F: i32 = 68;
const COMPUTE_64F: i32 = 70;
// cublasOperation_t
const OP_N: i32 = 0;
const OP_T: i32 = 1;
// cublasLtMatmulDescAttributes_t
const DESC_TRANSA: i32 = 3;
const DESC_TRANSB: i32 = 4;
// cublasLtMatrixLayoutAttribute_t
const LAYOUT_BATCH_COUNT: i32 = 5;
const LAYOUT_STRIDED_BATCH_OFFSET: i32 = 6;
// cublasLtMatmulPreferenceAttributes_t
const PREF_MAX_WORKSPACE_BYTES: i32 = 1;
const PREF_REDUCTION_SCHEME_MASK: i32 = 3;
/// Of a, b, c and d in a row.
const PREF_MIN_ALIGNMENT_BYTES: [i32; 4] = [5, 6, 7, 8];
/// cublasLtReductionScheme_t: partial sums are added up in the compute type. (Not splitting k is always allowed.)
const REDUCTION_COMPUTE_TYPE: u32 = 2;

/// `cublasLtMatmulAlgo_t`, opaque.
type Algorithm = [u64; 8];

/// `cublasLtMatmulHeuristicResult_t`.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
struct Heuristic {
    algorithm: Algorithm,
    workspace: usize,
    state: Status,
    waves: f32,
    reserved: [i32; 4],
}

/// Declares the functions with their types, and how to find them.
macro_rules! functions {
    ($($field:ident = $name:literal($($argument:ty),*);)*) => {
        #[derive(Debug)]
        struct Functions {
            $($field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            /// # Safety
            /// The library is cuBLASLt, and stays loaded for as long as the functions are called.
            unsafe fn of(library: &Library) -> std::result::Result<Functions, libloading::Error> {
                // SAFETY: these are the functions' types in cublasLt.h.
                Ok(Functions { $($field: unsafe { *library.get($name)? },)* })
            }
        }
    };
}

functions! {
    create = b"cublasLtCreate"(*mut Handle);
    destroy = b"cublasLtDestroy"(Handle);
    desc_create = b"cublasLtMatmulDescCreate"(*mut Handle, i32, i32);
    desc_set = b"cublasLtMatmulDescSetAttribute"(Handle, i32, *const c_void, usize);
    desc_destroy = b"cublasLtMatmulDescDestroy"(Handle);
    layout_create = b"cublasLtMatrixLayoutCreate"(*mut Handle, i32, u64, u64, i64);
    layout_set = b"cublasLtMatrixLayoutSetAttribute"(Handle, i32, *const c_void, usize);
    layout_destroy = b"cublasLtMatrixLayoutDestroy"(Handle);
    preference_create = b"cublasLtMatmulPreferenceCreate"(*mut Handle);
    preference_set = b"cublasLtMatmulPreferenceSetAttribute"(Handle, i32, *const c_void, usize);
    preference_destroy = b"cublasLtMatmulPreferenceDestroy"(Handle);
    heuristic = b"cublasLtMatmulAlgoGetHeuristic"(
        Handle, Handle, Handle, Handle, Handle, Handle, Handle, i32, *mut Heuristic, *mut i32
    );
    matmul = b"cublasLtMatmul"(
        Handle, Handle, *const c_void, *const c_void, Handle, *const c_void, Handle, *const c_void, *const c_void,
        Handle, *mut c_void, Handle, *const Algorithm, *mut c_void, usize, *mut c_void
    );
}

/// A product's description, as the library wants it, and its algorithm.
#[derive(Debug)]
struct Plan {
    desc: Handle,
    /// Of a, b and out.
    layouts: [Handle; 3],
    algorithm: Algorithm,
}

#[derive(Debug)]
struct Loaded {
    functions: Functions,
    handle: Handle,
    workspace: usize,
    /// None where there is no algorithm.
    plans: Mutex<HashMap<Gemm, Option<Plan>>>,
}

// SAFETY: the library's handle and descriptions may be used from any thread that has the context current; plans are
// made, and calls are queued, behind the Mutex.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

fn check(status: Status) -> std::result::Result<(), Status> {
    if status == SUCCESS { Ok(()) } else { Err(status) }
}

impl Loaded {
    /// None where there is no library that works with this device's driver.
    fn new(gpu: &Gpu) -> Result<Option<Loaded>> {
        let names: Vec<PathBuf> = match std::env::var_os(VARIABLE) {
            Some(name) if name == "none" => return Ok(None),
            Some(name) => vec![name.into()],
            // It calls NVIDIA's driver, whatever this process uses in its place.
            None if !is_nvidias_driver() => return Ok(None),
            None => NAMES.iter().map(PathBuf::from).collect(),
        };
        // SAFETY: loading runs the library's initialisers; it is NVIDIA's, or what the user named as such.
        let Some(library) = names.iter().find_map(|name| unsafe { Library::new(name) }.ok()) else { return Ok(None) };
        // SAFETY: the library is never unloaded (it isn't made for that).
        let Ok(functions) = (unsafe { Functions::of(&library) }) else { return Ok(None) };
        std::mem::forget(library);
        gpu.enter()?;
        let mut handle = null_mut();
        // SAFETY: writes the handle; a context is current.
        if unsafe { (functions.create)(&mut handle) } != SUCCESS {
            return Ok(None);
        }
        match gpu.allocate(WORKSPACE) {
            Ok(workspace) => Ok(Some(Loaded { functions, handle, workspace, plans: Mutex::default() })),
            Err(error) => {
                // SAFETY: the handle was made above and is used no more.
                unsafe { (functions.destroy)(handle) };
                Err(error)
            }
        }
    }

    fn run(
        &self,
        gpu: &Gpu,
        gemm: &Gemm,
        addresses: impl Iterator<Item = [u64; 3]>,
        alpha: f64,
        accumulate: bool,
    ) -> Result<bool> {
        gpu.enter()?;
        let mut plans = self.plans.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let plan = plans.entry(*gemm).or_insert_with(|| self.functions.plan(self.handle, gemm));
        let Some(plan) = plan else { return Ok(false) };
        // Factors have the type that sums have.
        let beta = f64::from(u8::from(accumulate));
        let (wide, single) = ([alpha, beta], [alpha as f32, beta as f32]);
        let [alpha, beta]: [*const c_void; 2] = match gemm.out.dtype {
            DType::F64 => [(&raw const wide[0]).cast(), (&raw const wide[1]).cast()],
            _ => [(&raw const single[0]).cast(), (&raw const single[1]).cast()],
        };
        let [a_layout, b_layout, out_layout] = plan.layouts;
        for [a, b, out] in addresses {
            let (a, b, out) = (a as *const c_void, b as *const c_void, out as *mut c_void);
            // SAFETY: the description fits the operands, which `Gemm` says; they lie on this device, alive and in
            // bounds, and `out` shares nothing with a and b (the contract of core). The workspace is used in the
            // order of the stream.
            let status = unsafe {
                (self.functions.matmul)(
                    self.handle,
                    plan.desc,
                    alpha,
                    a,
                    a_layout,
                    b,
                    b_layout,
                    beta,
                    out.cast_const(),
                    out_layout,
                    out,
                    out_layout,
                    &plan.algorithm,
                    self.workspace as *mut c_void,
                    WORKSPACE,
                    gpu.stream(),
                )
            };
            check(status).map_err(|status| Error::Device {
                device: gpu.name().into(),
                reason: format!("cublasLtMatmul failed with status {status} for {gemm:?}"),
            })?;
        }
        Ok(true)
    }
}

impl Functions {
    /// None where the library has no algorithm for the product.
    fn plan(&self, handle: Handle, gemm: &Gemm) -> Option<Plan> {
        let mut plan = Plan { desc: null_mut(), layouts: [null_mut(); 3], algorithm: Algorithm::default() };
        let mut preference = null_mut();
        let made = self.fill_in(&mut plan, &mut preference, handle, gemm);
        if !preference.is_null() {
            // SAFETY: it was made by the library and is used no more.
            unsafe { (self.preference_destroy)(preference) };
        }
        if made.is_err() {
            self.forget(&plan);
        }
        made.is_ok().then_some(plan)
    }

    fn fill_in(
        &self,
        plan: &mut Plan,
        preference: &mut Handle,
        handle: Handle,
        gemm: &Gemm,
    ) -> std::result::Result<(), Status> {
        let (compute, scale) = if gemm.out.dtype == DType::F64 { (COMPUTE_64F, R_64F) } else { (COMPUTE_32F, R_32F) };
        let operation = |operand: &Operand| if operand.transposed { OP_T } else { OP_N };
        // SAFETY: every call writes one handle, or sets an attribute of a handle made before from a value of the type
        // that cublasLt.h names for it.
        unsafe {
            check((self.desc_create)(&mut plan.desc, compute, scale))?;
            set(self.desc_set, plan.desc, DESC_TRANSA, operation(&gemm.a))?;
            set(self.desc_set, plan.desc, DESC_TRANSB, operation(&gemm.b))?;
            let sizes = [(gemm.a, gemm.m, gemm.k), (gemm.b, gemm.k, gemm.n), (gemm.out, gemm.m, gemm.n)];
            for ((operand, rows, columns), layout) in sizes.into_iter().zip(&mut plan.layouts) {
                let (rows, columns) = if operand.transposed { (columns, rows) } else { (rows, columns) };
                check((self.layout_create)(layout, data_type(operand.dtype), rows as u64, columns as u64, operand.ld))?;
                set(self.layout_set, *layout, LAYOUT_BATCH_COUNT, gemm.batch as i32)?;
                set(self.layout_set, *layout, LAYOUT_STRIDED_BATCH_OFFSET, operand.batch_stride)?;
            }
            check((self.preference_create)(preference))?;
            set(self.preference_set, *preference, PREF_MAX_WORKSPACE_BYTES, WORKSPACE as u64)?;
            set(self.preference_set, *preference, PREF_REDUCTION_SCHEME_MASK, REDUCTION_COMPUTE_TYPE)?;
            for (attribute, operand) in PREF_MIN_ALIGNMENT_BYTES.into_iter().zip([gemm.a, gemm.b, gemm.out, gemm.out]) {
                set(self.preference_set, *preference, attribute, operand.alignment)?;
            }
            let (mut found, mut count) = (Heuristic::default(), 0);
            let ([a, b, out], best) = (plan.layouts, 1);
            check((self.heuristic)(handle, plan.desc, a, b, out, out, *preference, best, &mut found, &mut count))?;
            check(if count < 1 { NO_ALGORITHM } else { found.state })?;
            plan.algorithm = found.algorithm;
        }
        Ok(())
    }

    /// Destroys what a plan is made of.
    fn forget(&self, plan: &Plan) {
        // SAFETY: what isn't null was made by the library and is used no more.
        unsafe {
            if !plan.desc.is_null() {
                (self.desc_destroy)(plan.desc);
            }
            for layout in plan.layouts.into_iter().filter(|layout| !layout.is_null()) {
                (self.layout_destroy)(layout);
            }
        }
    }
}

fn is_nvidias_driver() -> bool {
    let name = retape_cuda_driver::library().ok().and_then(|path| path.file_name()?.to_str());
    name.is_some_and(|name| name.starts_with("libcuda.so"))
}

/// The heuristics gave nothing; no status of the library's.
const NO_ALGORITHM: Status = -1;

fn data_type(dtype: DType) -> i32 {
    match dtype {
        DType::F64 => R_64F,
        DType::BF16 => R_16BF,
        DType::F16 => R_16F,
        _ => R_32F,
    }
}

type Set = unsafe extern "C" fn(Handle, i32, *const c_void, usize) -> Status;

/// # Safety
/// The handle is one that `function` takes, and the attribute is of type T.
unsafe fn set<T>(function: Set, handle: Handle, attribute: i32, value: T) -> std::result::Result<(), Status> {
    // SAFETY: as said above; the library copies the value.
    check(unsafe { function(handle, attribute, (&raw const value).cast(), size_of::<T>()) })
}
