// ---------------------------------------------------------------- from the registers of wgmma to rows
// Four 8 x 8 blocks, two side by side above two: lane l gives the row l % 16 of the left (l < 16) or right blocks.
DEVICE void stmatrix_x4(void* row, u32 left, u32 left_below, u32 right, u32 right_below) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(left), "r"(left_below), "r"(right), "r"(right_below) : "memory");
}

// Lane i of four gets word i of each of them, in their order.
DEVICE void transpose_quad(u32 (&word)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int j = 0; j < 4; j++)
      if ((j & distance) == 0) {
        u32 &low = word[j], &high = word[j + distance];
        const u32 other = __shfl_xor_sync(~0u, upper ? low : high, distance);
        if (upper) low = other;
        else high = other;
      }
  }
}

// Four 8 x 8 blocks, each transposed, two side by side above two: lane l gives the row l % 8 of block l / 8.
DEVICE void stmatrix_x4_trans(void* row, u32 left, u32 right, u32 left_below, u32 right_below) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(shared_address(row)), "r"(left), "r"(right), "r"(left_below), "r"(right_below) : "memory");
}

// Of two pairs of words the bytes at even places, and those at odd ones.
DEVICE u32 even_bytes(u32 low, u32 high) { return __byte_perm(low, high, 0x6420); }

DEVICE u32 odd_bytes(u32 low, u32 high) { return __byte_perm(low, high, 0x7531); }
