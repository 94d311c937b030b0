// The kernels of one instruction set. A unit defines TS_ISA (its namespace), TS_TABLE, TS_NAME and TS_SIMD (its vector
// header), and includes this file once. Everything stays inside an unnamed namespace: see kernel_table.h.
#include <cstddef>
#include <cstdint>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernel_table.h"

#define SIMD_INLINE inline __attribute__((always_inline))

namespace tokenspeed::cpu {
namespace {
namespace TS_ISA {
#include TS_SIMD
#include "kernels_math.h"
#include "kernels_gemm.h"
#include "kernels_rows.h"
#include "kernels_attention.h"
}  // namespace TS_ISA
}  // namespace

const KernelTable TS_TABLE = {
    TS_NAME,
    TS_ISA::gemm_block,
    TS_ISA::norm_rows,
    TS_ISA::rope_rows,
    TS_ISA::cache_write_rows,
    TS_ISA::gated_row,
    TS_ISA::attend,
    TS_ISA::load_scaled,
    TS_ISA::store_scaled,
    TS_ISA::axpy,
    TS_ISA::argmax_part,
};

}  // namespace tokenspeed::cpu
