#define TS_ISA avx512_bf16
#define TS_TABLE kAvx512Bf16Table
#define TS_NAME "avx512_bf16"
#define TS_SIMD "simd_avx512.h"
#include "isa_unit.h"
