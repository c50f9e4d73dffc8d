// ---------------------------------------------------------------- types
#define DEVICE __device__ __forceinline__

typedef unsigned short u16;

typedef unsigned int u32;

typedef long long i64;

typedef unsigned long long u64;

struct alignas(16) Chunk { u32 word[4]; };  // 16 bytes: what one instruction moves
