// XLA FFI handlers that hand 2:4-sparse matrices to cuSPARSELt.
//
// Host code only: nothing of CUDA is needed to build it. cuSPARSELt is opened at run time, so that one build serves
// every version from 0.8.0 to 0.10; the few prototypes and values used are declared here and tested against the
// header of the installed wheel.
//
// Two handlers: `compress` turns a dense row-major A that is 2:4 along its rows into cuSPARSELt's own blob, `matmul`
// multiplies that blob. Descriptors and plans are made once for each device, problem and algorithm. A handle and what
// was made with it are used under the lock of their device: the library does not say that they may be shared, and
// enqueueing takes microseconds.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

using Stream = void*;  // cudaStream_t
using Status = int;    // cusparseStatus_t, 0 is success

// Every opaque structure of the library has 512 bytes, aligned to 16; twice that leaves room.
struct alignas(16) Opaque {
  uint8_t data[1024];
};

enum Order : int { kOrderCol = 1, kOrderRow = 2 };                // cusparseOrder_t
enum Operation : int { kNonTranspose = 0, kTranspose = 1 };       // cusparseOperation_t
enum ComputeType : int { kCompute32F = 2 };                       // cusparseComputeType
enum Sparsity : int { kSparsity50Percent = 0 };                   // cusparseLtSparsity_t
enum Algorithm : int { kAlgDefault = 0 };                         // cusparseLtMatmulAlg_t
enum AlgorithmAttribute : int {                                   // cusparseLtMatmulAlgAttribute_t
  kConfigId = 0, kConfigMaxId = 1, kSplitK = 3, kSplitKMode = 4, kSplitKBuffers = 5,
};
enum CudaType : int { kF32 = 0, kF16 = 2, kBF16 = 14, kE4M3 = 28, kE5M2 = 29 };  // cudaDataType
constexpr uint32_t kAlignment = 16;  // bytes; XLA's buffers have 256

// The library's functions, by name without the common prefix.
#define SPARSE24_FUNCTIONS(F)                                                                                         \
  F(GetProperty, (int, int*))                                                                                         \
  F(Init, (Opaque*))                                                                                                  \
  F(DenseDescriptorInit, (const Opaque*, Opaque*, int64_t, int64_t, int64_t, uint32_t, int, int))                     \
  F(StructuredDescriptorInit, (const Opaque*, Opaque*, int64_t, int64_t, int64_t, uint32_t, int, int, int))           \
  F(MatDescriptorDestroy, (const Opaque*))                                                                            \
  F(MatmulDescriptorInit,                                                                                             \
    (const Opaque*, Opaque*, int, int, const Opaque*, const Opaque*, const Opaque*, const Opaque*, int))              \
  F(MatmulAlgSelectionInit, (const Opaque*, Opaque*, const Opaque*, int))                                             \
  F(MatmulAlgSelectionDestroy, (const Opaque*))                                                                       \
  F(MatmulAlgSetAttribute, (const Opaque*, Opaque*, int, const void*, size_t))                                        \
  F(MatmulAlgGetAttribute, (const Opaque*, const Opaque*, int, void*, size_t))                                        \
  F(MatmulPlanInit, (const Opaque*, Opaque*, const Opaque*, const Opaque*))                                           \
  F(MatmulPlanDestroy, (const Opaque*))                                                                               \
  F(MatmulGetWorkspace, (const Opaque*, const Opaque*, size_t*))                                                      \
  F(Matmul, (const Opaque*, const Opaque*, const void*, const void*, const void*, const void*, const void*, void*,    \
             void*, Stream*, int32_t))                                                                                \
  F(SpMMACompressedSize2, (const Opaque*, const Opaque*, size_t*, size_t*))                                           \
  F(SpMMACompress2, (const Opaque*, const Opaque*, int, int, const void*, void*, void*, Stream))

struct Api {
#define SPARSE24_DECLARE(name, arguments) Status(*name) arguments = nullptr;
  SPARSE24_FUNCTIONS(SPARSE24_DECLARE)
#undef SPARSE24_DECLARE
  const char* (*GetErrorString)(Status) = nullptr;
  int version = 0;  // 10000 major + 100 minor + patch
};

constexpr int kOldest = 800, kNewest = 1099;

std::mutex api_mutex;
// Set once, never freed: handlers may run until the process ends.
const Api* api = nullptr;

const Api& Library() {
  std::lock_guard<std::mutex> lock(api_mutex);
  if (api == nullptr) throw std::runtime_error("cuSPARSELt is not loaded");
  return *api;
}

void Check(const Api& lt, Status status, const std::string& what) {
  if (status == 0) return;
  throw std::runtime_error(what + ": " + lt.GetErrorString(status) + " (status " + std::to_string(status) + ")");
}

// A structure of the library with the function that releases it.
struct Owned {
  Opaque value;
  Status (*destroy)(const Opaque*) = nullptr;

  Owned() = default;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    if (destroy != nullptr) destroy(&value);
  }
};

// D[m, n] = A[m, k] B[k, n]. Settings below zero, or zero for split-K, are left to the library.
struct Problem {
  int64_t m, n, k, type, out_type;
  int64_t b_kn, out_nm;  // B is [K, N] rather than [N, K]; D is [N, M] rather than [M, N]
  int64_t algorithm, split_k, split_k_mode, split_k_buffers;

  auto key() const {
    return std::tie(m, n, k, type, out_type, b_kn, out_nm, algorithm, split_k, split_k_mode, split_k_buffers);
  }
  bool operator<(const Problem& other) const { return key() < other.key(); }

  std::string text() const {
    char buffer[256];
    std::snprintf(buffer, sizeof buffer,
                  "m=%lld n=%lld k=%lld, CUDA types %lld to %lld, B %s, D %s, algorithm %lld, split_k %lld mode %lld",
                  static_cast<long long>(m), static_cast<long long>(n), static_cast<long long>(k),
                  static_cast<long long>(type), static_cast<long long>(out_type), b_kn ? "kn" : "nk",
                  out_nm ? "nm" : "mn", static_cast<long long>(algorithm), static_cast<long long>(split_k),
                  static_cast<long long>(split_k_mode));
    return buffer;
  }
};

// A as cuSPARSELt sees it.
struct Matrix {
  Owned descriptor;
  size_t bytes = 0, scratch = 0;
};

struct Plan {
  // In this order, since each may point into those before it: members are destroyed last to first.
  Owned b, d, matmul, selection, plan;
  size_t workspace = 0;
  size_t blob_bytes = 0;
  int algorithms = 0;
};

struct Device {
  std::mutex mutex;
  bool ready = false;
  Opaque handle;
  std::map<std::tuple<int64_t, int64_t, int64_t>, std::unique_ptr<Matrix>> matrices;
  std::map<Problem, std::unique_ptr<Plan>> plans;
  int64_t made = 0;
};

Device& GetDevice(int ordinal) {
  static std::mutex mutex;
  static auto* devices = new std::map<int, std::unique_ptr<Device>>();
  std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Device>& device = (*devices)[ordinal];
  if (device == nullptr) device = std::make_unique<Device>();
  return *device;
}

// The functions below need the lock of `device`.

void EnsureHandle(const Api& lt, Device& device) {
  if (device.ready) return;
  Check(lt, lt.Init(&device.handle), "cusparseLtInit");
  device.ready = true;
}

Matrix& GetMatrix(const Api& lt, Device& device, int64_t m, int64_t k, int64_t type) {
  std::unique_ptr<Matrix>& found = device.matrices[{m, k, type}];
  if (found != nullptr) return *found;
  EnsureHandle(lt, device);
  auto made = std::make_unique<Matrix>();
  Check(lt,
        lt.StructuredDescriptorInit(&device.handle, &made->descriptor.value, m, k, k, kAlignment,
                                    static_cast<int>(type), kOrderRow, kSparsity50Percent),
        "cusparseLtStructuredDescriptorInit(" + std::to_string(m) + ", " + std::to_string(k) + ")");
  made->descriptor.destroy = lt.MatDescriptorDestroy;
  Check(lt, lt.SpMMACompressedSize2(&device.handle, &made->descriptor.value, &made->bytes, &made->scratch),
        "cusparseLtSpMMACompressedSize2");
  found = std::move(made);
  return *found;
}

void SetAttribute(const Api& lt, Device& device, Plan& plan, AlgorithmAttribute attribute, int64_t value,
                  const char* name, const Problem& p) {
  int setting = static_cast<int>(value);
  Check(lt, lt.MatmulAlgSetAttribute(&device.handle, &plan.selection.value, attribute, &setting, sizeof setting),
        std::string(name) + " refused for " + p.text());
}

Plan& GetPlan(const Api& lt, Device& device, const Problem& p) {
  auto found = device.plans.find(p);
  if (found != device.plans.end()) return *found->second;
  Matrix& a = GetMatrix(lt, device, p.m, p.k, p.type);
  auto plan = std::make_unique<Plan>();
  const Opaque* handle = &device.handle;
  int64_t b_rows = p.b_kn ? p.k : p.n, b_columns = p.b_kn ? p.n : p.k;
  Check(lt,
        lt.DenseDescriptorInit(handle, &plan->b.value, b_rows, b_columns, b_columns, kAlignment,
                               static_cast<int>(p.type), kOrderRow),
        "cusparseLtDenseDescriptorInit of B");
  plan->b.destroy = lt.MatDescriptorDestroy;
  Check(lt,
        lt.DenseDescriptorInit(handle, &plan->d.value, p.m, p.n, p.out_nm ? p.m : p.n, kAlignment,
                               static_cast<int>(p.out_type), p.out_nm ? kOrderCol : kOrderRow),
        "cusparseLtDenseDescriptorInit of D");
  plan->d.destroy = lt.MatDescriptorDestroy;
  Check(lt,
        lt.MatmulDescriptorInit(handle, &plan->matmul.value, kNonTranspose, p.b_kn ? kNonTranspose : kTranspose,
                                &a.descriptor.value, &plan->b.value, &plan->d.value, &plan->d.value, kCompute32F),
        "cusparseLtMatmulDescriptorInit for " + p.text());
  Check(lt, lt.MatmulAlgSelectionInit(handle, &plan->selection.value, &plan->matmul.value, kAlgDefault),
        "cusparseLtMatmulAlgSelectionInit for " + p.text());
  plan->selection.destroy = lt.MatmulAlgSelectionDestroy;
  Check(lt,
        lt.MatmulAlgGetAttribute(handle, &plan->selection.value, kConfigMaxId, &plan->algorithms,
                                 sizeof plan->algorithms),
        "CUSPARSELT_MATMUL_ALG_CONFIG_MAX_ID");
  if (p.algorithm >= 0) SetAttribute(lt, device, *plan, kConfigId, p.algorithm, "algorithm id", p);
  if (p.split_k > 0) SetAttribute(lt, device, *plan, kSplitK, p.split_k, "split_k", p);
  if (p.split_k_mode > 0) SetAttribute(lt, device, *plan, kSplitKMode, p.split_k_mode, "split_k_mode", p);
  if (p.split_k_buffers > 0) SetAttribute(lt, device, *plan, kSplitKBuffers, p.split_k_buffers, "split_k_buffers", p);
  Check(lt, lt.MatmulPlanInit(handle, &plan->plan.value, &plan->matmul.value, &plan->selection.value),
        "cusparseLtMatmulPlanInit for " + p.text());
  plan->plan.destroy = lt.MatmulPlanDestroy;
  Check(lt, lt.MatmulGetWorkspace(handle, &plan->plan.value, &plan->workspace), "cusparseLtMatmulGetWorkspace");
  plan->blob_bytes = a.bytes;
  ++device.made;
  return *device.plans.emplace(p, std::move(plan)).first->second;
}

// What XLA's buffers say.

int64_t ToCudaType(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32: return kF32;
    case ffi::DataType::F16: return kF16;
    case ffi::DataType::BF16: return kBF16;
    case ffi::DataType::F8E4M3FN: return kE4M3;
    case ffi::DataType::F8E5M2: return kE5M2;
    default: throw std::runtime_error("dtype " + std::to_string(static_cast<int>(type)) + " of XLA is not served");
  }
}

void CheckMatrix(const ffi::AnyBuffer& buffer, const char* name) {
  if (buffer.dimensions().size() == 2) return;
  throw std::runtime_error(std::string(name) + " must have two axes, found " +
                           std::to_string(buffer.dimensions().size()));
}

void CheckBlob(size_t found, size_t needed) {
  if (found >= needed) return;
  throw std::runtime_error("the compressed operand has " + std::to_string(found) + " bytes, cuSPARSELt needs " +
                           std::to_string(needed));
}

void* Allocate(ffi::ScratchAllocator& scratch, size_t bytes) {
  if (bytes == 0) return nullptr;
  std::optional<void*> memory = scratch.Allocate(bytes);
  if (!memory.has_value()) throw std::runtime_error("no memory for a workspace of " + std::to_string(bytes) + " bytes");
  return *memory;
}

// Nothing may be thrown into XLA, which is built without exceptions.
template <typename F>
ffi::Error Guarded(const char* name, F&& f) {
  try {
    f();
    return ffi::Error::Success();
  } catch (const std::exception& e) {
    return ffi::Error::Internal(std::string(name) + ": " + e.what());
  }
}

ffi::Error Compress(Stream stream, int32_t ordinal, ffi::ScratchAllocator scratch, ffi::AnyBuffer a,
                    ffi::Result<ffi::AnyBuffer> blob) {
  return Guarded("cuSPARSELt compress", [&] {
    CheckMatrix(a, "A");
    const Api& lt = Library();
    Device& device = GetDevice(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    Matrix& matrix = GetMatrix(lt, device, a.dimensions()[0], a.dimensions()[1], ToCudaType(a.element_type()));
    CheckBlob(blob->size_bytes(), matrix.bytes);
    Check(lt,
          lt.SpMMACompress2(&device.handle, &matrix.descriptor.value, 1, kNonTranspose, a.untyped_data(),
                            blob->untyped_data(), Allocate(scratch, matrix.scratch), stream),
          "cusparseLtSpMMACompress2");
  });
}

ffi::Error Matmul(Stream stream, int32_t ordinal, ffi::ScratchAllocator scratch, ffi::AnyBuffer blob, ffi::AnyBuffer b,
                  ffi::Result<ffi::AnyBuffer> d, std::string_view b_layout, std::string_view out_layout,
                  int64_t algorithm, int64_t split_k, int64_t split_k_mode, int64_t split_k_buffers) {
  return Guarded("cuSPARSELt matmul", [&] {
    CheckMatrix(b, "B");
    CheckMatrix(*d, "D");
    bool b_kn = b_layout == "kn", out_nm = out_layout == "nm";
    auto b_shape = b.dimensions(), d_shape = d->dimensions();
    Problem p = {d_shape[out_nm ? 1 : 0], d_shape[out_nm ? 0 : 1], b_shape[b_kn ? 0 : 1],
                 ToCudaType(b.element_type()), ToCudaType(d->element_type()), b_kn, out_nm,
                 algorithm, split_k, split_k_mode, split_k_buffers};
    if (b_shape[b_kn ? 1 : 0] != p.n) throw std::runtime_error("B and D disagree on N: " + p.text());
    const Api& lt = Library();
    Device& device = GetDevice(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    Plan& plan = GetPlan(lt, device, p);
    CheckBlob(blob.size_bytes(), plan.blob_bytes);
    float one = 1.0f, zero = 0.0f;
    Check(lt,
          lt.Matmul(&device.handle, &plan.plan.value, &one, blob.untyped_data(), b.untyped_data(), &zero,
                    d->untyped_data(), d->untyped_data(), Allocate(scratch, plan.workspace), &stream, 1),
          "cusparseLtMatmul for " + p.text());
  });
}

// For callers through ctypes.
template <typename F>
int64_t Answered(char* message, int64_t size, F&& f) {
  try {
    return f();
  } catch (const std::exception& e) {
    std::snprintf(message, static_cast<size_t>(size), "%s", e.what());
    return -1;
  }
}

int ReadVersion(const Api& lt) {
  int parts[3] = {0, 0, 0};
  for (int i = 0; i < 3; ++i) Check(lt, lt.GetProperty(i, &parts[i]), "cusparseLtGetProperty");
  return 10000 * parts[0] + 100 * parts[1] + parts[2];
}

void* Symbol(void* library, const std::string& name) {
  void* found = dlsym(library, name.c_str());
  if (found == nullptr) throw std::runtime_error("it has no " + name);
  return found;
}

std::unique_ptr<Api> OpenLibrary(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) throw std::runtime_error(dlerror());
  try {
    auto lt = std::make_unique<Api>();
    lt->GetErrorString = reinterpret_cast<decltype(lt->GetErrorString)>(Symbol(library, "cusparseLtGetErrorString"));
    lt->GetProperty = reinterpret_cast<decltype(lt->GetProperty)>(Symbol(library, "cusparseLtGetProperty"));
    lt->version = ReadVersion(*lt);
    if (lt->version < kOldest || lt->version > kNewest) {
      throw std::runtime_error("it is version " + std::to_string(lt->version / 10000) + "." +
                               std::to_string(lt->version / 100 % 100) + "." + std::to_string(lt->version % 100) +
                               ", 0.8.0 to 0.10 are served");
    }
#define SPARSE24_RESOLVE(name, arguments) \
  lt->name = reinterpret_cast<decltype(lt->name)>(Symbol(library, "cusparseLt" #name));
    SPARSE24_FUNCTIONS(SPARSE24_RESOLVE)
#undef SPARSE24_RESOLVE
    return lt;
  } catch (...) {
    dlclose(library);
    throw;
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    sparse24_cusparselt_compress, Compress,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<Stream>>().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::ScratchAllocator>()
        .Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    sparse24_cusparselt_matmul, Matmul,
    ffi::Ffi::Bind()
        .Ctx<ffi::PlatformStream<Stream>>().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::ScratchAllocator>()
        .Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Ret<ffi::AnyBuffer>()
        .Attr<std::string_view>("b_layout").Attr<std::string_view>("out_layout")
        .Attr<int64_t>("algorithm").Attr<int64_t>("split_k").Attr<int64_t>("split_k_mode")
        .Attr<int64_t>("split_k_buffers"));

extern "C" {

// The version of XLA's FFI that this was built against: 1000 major + minor.
int64_t sparse24_ffi_api_version() { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

// Opens cuSPARSELt; its version as 10000 major + 100 minor + patch, or -1 and a message. The first success stays.
int64_t sparse24_cusparselt_open(const char* path, char* message, int64_t size) {
  return Answered(message, size, [&]() -> int64_t {
    std::lock_guard<std::mutex> lock(api_mutex);
    if (api == nullptr) api = OpenLibrary(path).release();
    return api->version;
  });
}

// Makes or finds the plan of a problem; the bytes of its workspace, or -1 and a message. The device must be current.
int64_t sparse24_cusparselt_plan(int64_t ordinal, const Problem* problem, char* message, int64_t size) {
  return Answered(message, size, [&]() -> int64_t {
    const Api& lt = Library();
    Device& device = GetDevice(static_cast<int>(ordinal));
    std::lock_guard<std::mutex> lock(device.mutex);
    return static_cast<int64_t>(GetPlan(lt, device, *problem).workspace);
  });
}

// How many algorithm ids there are for a problem, or -1 and a message. The device must be current.
int64_t sparse24_cusparselt_algorithms(int64_t ordinal, const Problem* problem, char* message, int64_t size) {
  return Answered(message, size, [&]() -> int64_t {
    const Api& lt = Library();
    Device& device = GetDevice(static_cast<int>(ordinal));
    std::lock_guard<std::mutex> lock(device.mutex);
    return GetPlan(lt, device, *problem).algorithms;
  });
}

// How many plans were made for a device.
int64_t sparse24_cusparselt_plans_made(int64_t ordinal) {
  Device& device = GetDevice(static_cast<int>(ordinal));
  std::lock_guard<std::mutex> lock(device.mutex);
  return device.made;
}

}  // extern "C"
