/* AMX tiles: 16 rows of 64 bytes. A product reads a tile of rows, and a tile whose columns are interleaved by 32-bit
 * words. */
#ifndef OSD_TILES_H
#define OSD_TILES_H

#include <immintrin.h>
#include <stdint.h>

#define TILE_ROWS 16
#define TILE_BYTES 64 /* of a row */

/* Tile configuration of the CPU. */
typedef struct {
  uint8_t palette, start_row, unused[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} Tiles;

/* Configure zeroed tiles: `rows` rows in all tiles but the last. */
static inline void begin_tiles(int rows) {
  Tiles tiles = {.palette = 1};
  for (int t = 0; t < 8; t++) {
    tiles.row_bytes[t] = TILE_BYTES;
    tiles.rows[t] = (uint8_t)(t == 7 ? TILE_ROWS : rows);
  }
  _tile_loadconfig(&tiles);
}

#endif
