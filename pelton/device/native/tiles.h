/* AMX tiles: eight of 16 lines of 64 bytes. */
#ifndef PELTON_TILES_H
#define PELTON_TILES_H

#include "vec.h"

#define TILE (16 * 32) /* elements of bfloat16 */

#ifdef __AMX_BF16__

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

/* Of the calling thread, until _tile_release. */
static inline void configure_tiles(void) {
    tile_config config __attribute__((aligned(64))) = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        config.row_bytes[tile] = 64;
        config.rows[tile] = 16;
    }
    /* The intrinsic tells gcc 12 of eight of its bytes only. */
    __asm__ volatile("" ::"m"(config));
    _tile_loadconfig(&config);
}

#endif
#endif
