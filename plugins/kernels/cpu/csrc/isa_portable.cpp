#define TS_ISA portable
#define TS_TABLE kPortableTable
#define TS_NAME "portable"
#define TS_SIMD "simd_portable.h"
#include "isa_unit.h"
