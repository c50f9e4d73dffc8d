// ---------------------------------------------------------------- what a tile lets an expression be
enum TileClass { EMPTY, PARTIAL, FULL };
