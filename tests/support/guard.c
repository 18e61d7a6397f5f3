#include "support/guard.h"
#include "support/test.h"

#include <sys/mman.h>
#include <unistd.h>

enum { SLACK_BYTE = 0xA5, POISON_BYTE = 0xFF };

/* [ inaccessible | room: slack, block, slack | inaccessible ]. The list of blocks is in memory that the
 * library does not use. */
typedef struct guarded {
    struct guarded *next;
    unsigned char *room, *block;
    size_t room_bytes, bytes;
} guarded;

static guarded *blocks;

void *td_guard_alloc(size_t bytes, bool behind, size_t alignment, size_t offset)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t room = (bytes + alignment + page - 1) / page * page;
    guarded *one = calloc(1, sizeof *one);
    unsigned char *map =
        mmap(NULL, room + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (!one || map == MAP_FAILED || mprotect(map + page, room, PROT_READ | PROT_WRITE) != 0)
        fail_msg("no memory for a guarded block of %zu bytes", bytes);
    const size_t last = room - bytes; /* the latest start, before it is aligned */
    const size_t start =
        behind ? last - (last + alignment - offset % alignment) % alignment : offset % alignment;
    *one = (guarded){
        .next = blocks, .room = map + page, .block = map + page + start, .room_bytes = room, .bytes = bytes};
    blocks = one;
    memset(one->room, SLACK_BYTE, room);
    memset(one->block, POISON_BYTE, bytes);
    return one->block;
}

void td_guard_free(void *block)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    guarded **link = &blocks;
    long touched = 0; /* distance from the block, negative before it */
    bool found = false;

    if (!block)
        return;
    while (*link && (*link)->block != block)
        link = &(*link)->next;
    guarded *one = *link;
    assert_non_null(one);
    *link = one->next;
    for (size_t i = 0; i < one->room_bytes && !found; i++) {
        const long at = (long)i - (one->block - one->room);

        found = (at < 0 || at >= (long)one->bytes) && one->room[i] != SLACK_BYTE;
        touched = at;
    }
    const size_t bytes = one->bytes;
    munmap(one->room - page, one->room_bytes + 2 * page);
    free(one);
    if (found)
        fail_msg("byte %ld of a block of %zu bytes was written", touched, bytes);
}
