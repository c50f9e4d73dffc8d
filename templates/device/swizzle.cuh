// ---------------------------------------------------------------- tiles in shared memory
// Rows of 16-byte chunks; chunk c of row r lies at c ^ r / (8 / GROUP) % GROUP, GROUP = gcd(CHUNKS, 8), so that the
// same chunk of eight rows falls into eight different groups of four banks, whatever the width.
template <int ROWS, int COLUMNS> struct alignas(128) SwizzledTile {
  static constexpr int CHUNKS = COLUMNS / 8, GROUP = (CHUNKS | 8) & -(CHUNKS | 8);
  static constexpr int BLOCK = 16 * COLUMNS * 2;  // bytes from a row to the one 16 further down
  u16 element[ROWS][COLUMNS];
  DEVICE u16* at(int row, int chunk) { return &element[row][8 * (chunk ^ row / (8 / GROUP) % GROUP)]; }
  // From the address of chunk 0 of a row to that of a later one; from that of chunk 1, of one an even number further.
  static DEVICE u32 right(u32 address, int chunks) {
    return (address ^ 16 * (chunks % GROUP)) + 16 * (chunks / GROUP * GROUP);
  }
};

DEVICE constexpr int floor_power_of_two(int n) { return n < 2 ? n : 2 * floor_power_of_two(n / 2); }

// Starts to copy `rows` rows of COLUMNS elements from global memory; the tile's other rows and columns become zero.
template <int THREADS, int COLUMNS, int ROWS, int TILE_COLUMNS>
DEVICE void load_tile(
    SwizzledTile<ROWS, TILE_COLUMNS>& tile, const u16* source, i64 row_stride, int rows, int thread = threadIdx.x) {
  constexpr int CHUNKS = TILE_COLUMNS / 8, STEP = floor_power_of_two(THREADS / CHUNKS);  // rows copied at a time
  const int first = thread / CHUNKS, chunk = thread % CHUNKS;
  source += first * row_stride + 8 * chunk;
#pragma unroll
  for (int step = 0; step < ROWS; step += STEP) {
    const int row = first + step;
    if ((THREADS == STEP * CHUNKS || first < STEP) && (ROWS % STEP == 0 || row < ROWS)) {
      const u32 address = shared_address(tile.at(first + step % 8, chunk)) + (step - step % 8) * 2 * TILE_COLUMNS;
      cp_async_16(address, source, row < rows && 8 * chunk < COLUMNS);
    }
    source += STEP * row_stride;
  }
}

// The same of rows of 1 << log2 heads: row r is row r >> log2 of head r % (1 << log2).
template <int THREADS, int COLUMNS, int ROWS, int TILE_COLUMNS>
DEVICE void load_packs(SwizzledTile<ROWS, TILE_COLUMNS>& tile, const u16* source, i64 head_stride, i64 row_stride,
                       int log2, int rows) {
  constexpr int CHUNKS = TILE_COLUMNS / 8;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS;
    const u16* there = source + (row & (1 << log2) - 1) * head_stride + (row >> log2) * row_stride + 8 * chunk;
    cp_async_16(shared_address(tile.at(row, chunk)), there, row < rows && 8 * chunk < COLUMNS);
  }
}
