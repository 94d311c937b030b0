#define TS_ISA avx2
#define TS_TABLE kAvx2Table
#define TS_NAME "avx2"
#define TS_SIMD "simd_avx2.h"
#include "isa_unit.h"
