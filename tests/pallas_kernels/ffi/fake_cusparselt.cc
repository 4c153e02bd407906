// A stand-in for libcusparseLt.so: no GPU, no arithmetic. It keeps the library's contract about structures and handles,
// counts calls, and notices two threads that use one handle at the same time.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace {

constexpr size_t kBytes = 512;  // of every opaque structure, in 0.8.0 as in 0.10.0
constexpr int kAlgorithms = 7;

std::atomic<int> inits{0}, plans{0}, overlaps{0}, destroyed{0}, wrong{0}, inside{0};

// Marks a handle as busy while a call has it.
struct Use {
  explicit Use(const void* handle) {
    if (static_cast<const char*>(handle)[0] != 'h') ++wrong;
    if (inside.fetch_add(1) != 0) ++overlaps;
  }
  ~Use() { --inside; }
};

void Fill(void* structure, char mark) { std::memset(structure, mark, kBytes); }

void Expect(const void* structure, char mark) {
  if (static_cast<const char*>(structure)[kBytes - 1] != mark) ++wrong;
}

}  // namespace

extern "C" {

int fake_inits() { return inits; }
int fake_plans() { return plans; }
int fake_overlaps() { return overlaps; }
int fake_destroyed() { return destroyed; }
int fake_wrong() { return wrong; }

const char* cusparseLtGetErrorString(int status) { return status == 3 ? "invalid value" : "other error"; }

int cusparseLtGetProperty(int property, int* value) {
  const char* minor = std::getenv("FAKE_MINOR");
  const char* major = std::getenv("FAKE_MAJOR");
  *value = property == 0 ? (major ? std::atoi(major) : 0) : property == 1 ? (minor ? std::atoi(minor) : 8) : 1;
  return 0;
}

int cusparseLtInit(void* handle) {
  ++inits;
  Fill(handle, 'h');
  return 0;
}

int cusparseLtDenseDescriptorInit(const void* handle, void* d, int64_t rows, int64_t columns, int64_t ld,
                                  uint32_t alignment, int type, int order) {
  Use use(handle);
  bool fits = rows % 8 == 0 && columns % 8 == 0 && ld == (order == 2 ? columns : rows) && alignment == 16 && type >= 0;
  if (!fits || (order != 1 && order != 2)) return 3;
  Fill(d, 'm');
  return 0;
}

int cusparseLtStructuredDescriptorInit(const void* handle, void* d, int64_t rows, int64_t columns, int64_t ld,
                                       uint32_t alignment, int, int order, int sparsity) {
  Use use(handle);
  if (rows % 32 || columns % 32 || ld != columns || alignment != 16 || order != 2 || sparsity != 0) return 3;
  Fill(d, 's');
  return 0;
}

int cusparseLtMatDescriptorDestroy(const void*) {
  ++destroyed;
  return 0;
}

int cusparseLtMatmulDescriptorInit(const void* handle, void* matmul, int op_a, int op_b, const void* a, const void* b,
                                   const void* c, const void* d, int compute) {
  Use use(handle);
  Expect(a, 's');
  Expect(b, 'm');
  Expect(c, 'm');
  if (op_a != 0 || (op_b != 0 && op_b != 1) || c != d || compute != 2) return 3;
  Fill(matmul, 'x');
  return 0;
}

int cusparseLtMatmulAlgSelectionInit(const void* handle, void* selection, const void* matmul, int algorithm) {
  Use use(handle);
  Expect(matmul, 'x');
  Fill(selection, 'a');
  return algorithm == 0 ? 0 : 3;
}

int cusparseLtMatmulAlgSelectionDestroy(const void*) {
  ++destroyed;
  return 0;
}

int cusparseLtMatmulAlgSetAttribute(const void* handle, void* selection, int attribute, const void* data, size_t size) {
  Use use(handle);
  Expect(selection, 'a');
  int value = *static_cast<const int*>(data);
  if (size != sizeof(int)) return 3;
  if (attribute == 0) return value >= 0 && value < kAlgorithms ? 0 : 3;
  if (attribute == 3) return value >= 1 && value <= 16 ? 0 : 3;
  if (attribute == 4) return value >= 1 && value <= 6 ? 0 : 3;
  return attribute == 5 ? 0 : 3;
}

int cusparseLtMatmulAlgGetAttribute(const void* handle, const void* selection, int attribute, void* data, size_t) {
  Use use(handle);
  Expect(selection, 'a');
  if (attribute != 1) return 3;
  *static_cast<int*>(data) = kAlgorithms;
  return 0;
}

int cusparseLtMatmulPlanInit(const void* handle, void* plan, const void* matmul, const void* selection) {
  Use use(handle);
  Expect(matmul, 'x');
  Expect(selection, 'a');
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // wide enough for a race to show
  ++plans;
  Fill(plan, 'p');
  return 0;
}

int cusparseLtMatmulPlanDestroy(const void*) {
  ++destroyed;
  return 0;
}

int cusparseLtMatmulGetWorkspace(const void* handle, const void* plan, size_t* bytes) {
  Use use(handle);
  Expect(plan, 'p');
  *bytes = 4096;
  return 0;
}

int cusparseLtMatmul(const void*, const void*, const void*, const void*, const void*, const void*, const void*, void*,
                     void*, void**, int32_t) {
  return 7;
}

int cusparseLtSpMMACompressedSize2(const void* handle, const void* matrix, size_t* bytes, size_t* scratch) {
  Use use(handle);
  Expect(matrix, 's');
  *bytes = 12345;
  *scratch = 0;
  return 0;
}

int cusparseLtSpMMACompress2(const void*, const void*, int, int, const void*, void*, void*, void*) { return 7; }

}  // extern "C"
