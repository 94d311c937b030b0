#define TS_ISA avx512
#define TS_TABLE kAvx512Table
#define TS_NAME "avx512"
#define TS_SIMD "simd_avx512.h"
#include "isa_unit.h"
