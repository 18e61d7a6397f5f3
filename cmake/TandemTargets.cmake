# td_add_module(NAME SOURCES ... MAY_USE ... [CUDA_SOURCES ...]): a module of impl/ as objects. MAY_USE lists
#   the modules that its files may include; ci/check/floors.py checks this. A build without CUDA leaves out
#   CUDA_SOURCES, which may also include kernels/.
# td_add_kernels(SOURCES ...): kernels/ as objects.
# td_add_engine(NAME SOURCES ... LIBRARIES ...): libtandem_NAME.so, which libtandem loads at its first use.
# td_add_test(NAME SOURCES ... USES ... [WRAP symbol ...] [FAULTS function ...] [LABELS ...] [TIMEOUT seconds]
#   [ARGUMENTS ...]): a CMocka program that links the static modules (so that --wrap sees their calls) and
#   tests/support. Doubles wrap the functions of FAULTS, and fail if told to (tests/support/fault.h).
# td_add_run_path(TARGET FOLDER PATH): in the build tree TARGET searches PATH and CMAKE_BUILD_RPATH for
#   libraries. Installed into FOLDER, it searches only PATH. Call it after install(TARGETS).
# td_describe_build(OUT file TEMPLATE file MODULES ...): the source file of td_build_info(). Every build
#   writes it again if its content has changed.

include(CMakeParseArguments)
include(CheckCCompilerFlag)

add_library(td_flags INTERFACE)
target_compile_definitions(td_flags INTERFACE _GNU_SOURCE)
# -std=c11 would turn off fused multiply-add (-ffp-contract). errno and floating-point traps would keep the
# compiler from vectorising, and no code here reads them. NaN and infinity keep their meaning: -ffast-math is
# not used.
target_compile_options(td_flags INTERFACE -Wall -Wextra -Wpedantic -march=${TANDEM_MARCH}
                       -ffp-contract=fast -fno-math-errno -fno-trapping-math -fvisibility=hidden)
# gcc and clang prefer 256-bit vectors on Intel's server processors. Attention and the fused loops here are
# faster with 512. Compilers for other processors do not know the option.
check_c_compiler_flag(-mprefer-vector-width=512 TANDEM_HAVE_VECTOR_WIDTH)
if(TANDEM_HAVE_VECTOR_WIDTH)
  target_compile_options(td_flags INTERFACE $<$<C_COMPILER_ID:GNU,Clang>:-mprefer-vector-width=512>)
endif()
# Clang 19 says this of -march=native itself on some processors.
check_c_compiler_flag(-Winvalid-feature-combination TANDEM_HAVE_FEATURE_WARNING)
if(TANDEM_HAVE_FEATURE_WARNING)
  target_compile_options(td_flags INTERFACE $<$<COMPILE_LANGUAGE:C>:-Wno-invalid-feature-combination>)
endif()
# If gcc 12 tunes for Intel's processors from skylake on, it may turn two branches into conditional moves and
# overwrite their flags in between. Seen with 12.2: "i + 1 < n ? a : b" gave b.
target_compile_options(td_flags INTERFACE $<$<C_COMPILER_ID:GNU>:-fno-if-conversion>)
# gcc 12 removes a call of a static function if the memory that the function writes is freed afterwards. It
# does so although the function calls others (12.2, `forget_graphs` in td_train_destroy at -O1; at -O3 if the
# function is not inlined). tests/base.c has such a call. gcc has the first option since version 11.
check_c_compiler_flag(-fno-ipa-modref TANDEM_HAVE_IPA_MODREF)
if(TANDEM_HAVE_IPA_MODREF)
  target_compile_options(td_flags INTERFACE $<$<C_COMPILER_ID:GNU>:-fno-ipa-modref$<SEMICOLON>-fno-ipa-pure-const>)
endif()
target_include_directories(td_flags INTERFACE "${PROJECT_SOURCE_DIR}/impl")
target_link_libraries(td_flags INTERFACE OpenMP::OpenMP_C m)

# Only the sources of impl/ have counters for coverage (TD_COUNTERS): nobody reads those of the tests.
add_library(td_instrument INTERFACE)
set(TD_COUNTERS "")
if(TANDEM_SANITIZE)
  set(TD_COUNTERS --coverage -fprofile-update=single)
  # gcov would count a branch for each value of a bool, each argument that may not be NULL, and each division.
  target_compile_options(td_instrument INTERFACE -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
                         -fno-sanitize=bool,nonnull-attribute,integer-divide-by-zero)
  # Stack traces do not need the locations of variables, and gcc spends an eighth of its time on them.
  target_compile_options(td_instrument INTERFACE $<$<C_COMPILER_ID:GNU>:-fno-var-tracking-assignments>)
  # AddressSanitizer replaces dlopen, and its dlopen searches only this older kind of run path.
  target_link_options(td_instrument INTERFACE -fsanitize=address,undefined --coverage LINKER:--disable-new-dtags)
endif()

if(TANDEM_HAVE_CUDA)
  target_compile_definitions(td_flags INTERFACE TANDEM_HAVE_CUDA)
endif()

foreach(backend IN ITEMS MPI GLOO NCCL)
  if(TANDEM_HAVE_${backend})
    target_compile_definitions(td_flags INTERFACE TANDEM_HAVE_${backend})
  endif()
endforeach()

set_property(GLOBAL PROPERTY TD_MODULES "")
set_property(GLOBAL PROPERTY TD_ENGINES "")

function(td_add_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;MAY_USE;LIBRARIES;CUDA_SOURCES" ${ARGN})
  add_library(td_${name} STATIC ${ARG_SOURCES})
  if(TANDEM_HAVE_CUDA AND ARG_CUDA_SOURCES)
    target_sources(td_${name} PRIVATE ${ARG_CUDA_SOURCES})
    target_link_libraries(td_${name} PUBLIC td_kernels tandem_cudart tandem_cublaslt)
  endif()
  set_target_properties(td_${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  target_link_libraries(td_${name} PRIVATE td_flags td_instrument)
  target_link_libraries(td_${name} PUBLIC ${ARG_LIBRARIES})
  foreach(used IN LISTS ARG_MAY_USE)
    target_link_libraries(td_${name} PUBLIC td_${used})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY TD_MODULES td_${name})
endfunction()

function(td_add_engine name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBRARIES" ${ARGN})
  add_library(tandem_${name} MODULE ${ARG_SOURCES})
  target_link_libraries(tandem_${name} PRIVATE td_flags td_instrument ${ARG_LIBRARIES})
  set_property(GLOBAL APPEND PROPERTY TD_ENGINES tandem_${name})
  # The build tree has a run path to the engines; an installed library searches its own folder.
  add_dependencies(td_comm tandem_${name})
endfunction()

# Kernels see the public headers of impl/ for their structs.
function(td_add_kernels)
  cmake_parse_arguments(ARG "" "" "SOURCES" ${ARGN})
  add_library(td_kernels STATIC ${ARG_SOURCES})
  set_target_properties(td_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON LINKER_LANGUAGE C)
  target_include_directories(td_kernels PRIVATE "${PROJECT_SOURCE_DIR}/impl")
  target_include_directories(td_kernels PUBLIC "${PROJECT_SOURCE_DIR}")
  target_compile_options(td_kernels PRIVATE -Xcompiler=-Wall,-Wextra,-fvisibility=hidden
                         --diag-suppress=128 ${TANDEM_CUDA_FLAGS}) # 128: a template whose loop has no turns
  set_property(GLOBAL APPEND PROPERTY TD_MODULES td_kernels)
endfunction()

function(td_add_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;USES;WRAP;FAULTS;LABELS;LIBRARIES;ARGUMENTS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
    if(TANDEM_SANITIZE)
      set(ARG_TIMEOUT 300)
    endif()
  endif()
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit cpu)
  endif()
  if(ARG_FAULTS)
    set(doubles "${CMAKE_CURRENT_BINARY_DIR}/${name}_doubles.c")
    list(JOIN ARG_FAULTS " " faults)
    file(GLOB headers "${PROJECT_SOURCE_DIR}/impl/*/*.h")
    add_custom_command(OUTPUT "${doubles}" VERBATIM
      COMMAND "${CMAKE_COMMAND}" "-DNAMES=${faults}" "-DROOT=${PROJECT_SOURCE_DIR}/impl" "-DOUT=${doubles}"
              -P "${PROJECT_SOURCE_DIR}/cmake/doubles.cmake"
      DEPENDS ${headers} "${PROJECT_SOURCE_DIR}/cmake/doubles.cmake" COMMENT "Writing ${name}_doubles.c")
    list(APPEND ARG_SOURCES "${doubles}")
    list(APPEND ARG_WRAP ${ARG_FAULTS})
  endif()
  add_executable(test_${name} ${ARG_SOURCES})
  foreach(source IN LISTS ARG_SOURCES)
    if(source MATCHES "^${PROJECT_SOURCE_DIR}/impl/")
      set_source_files_properties("${source}" PROPERTIES COMPILE_OPTIONS "${TD_COUNTERS}")
    endif()
  endforeach()
  target_link_libraries(test_${name} PRIVATE td_flags td_instrument td_support cmocka::cmocka ${ARG_LIBRARIES})
  # The tested code is optimised. The tests themselves compile faster with fewer optimisations.
  target_compile_options(test_${name} PRIVATE $<$<AND:$<CONFIG:RelWithDebInfo>,$<COMPILE_LANGUAGE:C>>:-O1>)
  foreach(used IN LISTS ARG_USES)
    target_link_libraries(test_${name} PRIVATE td_${used})
  endforeach()
  foreach(symbol IN LISTS ARG_WRAP)
    target_link_options(test_${name} PRIVATE "-Wl,--wrap=${symbol}")
  endforeach()
  add_test(NAME ${name} COMMAND test_${name} ${ARG_ARGUMENTS})
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT ${ARG_TIMEOUT} LABELS "${ARG_LABELS}")
endfunction()

# CMake would end the run path of the build tree with an empty element. The loader takes this for the current
# folder, so a program could load libraries from the folder in which a user starts it.
function(td_add_run_path target folder path)
  set_target_properties(${target} PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH_USE_LINK_PATH ON
                        INSTALL_RPATH "${path};${CMAKE_BUILD_RPATH}")
  if(NOT IS_ABSOLUTE "${folder}")
    string(PREPEND folder "\${CMAKE_INSTALL_PREFIX}/")
  endif()
  if(NOT CMAKE_SKIP_RPATH)
    install(CODE "file(RPATH_SET FILE \"\$ENV{DESTDIR}${folder}/$<TARGET_FILE_NAME:${target}>\" NEW_RPATH [[${path}]])")
  endif()
endfunction()

function(td_describe_build)
  cmake_parse_arguments(ARG "" "OUT;TEMPLATE" "MODULES" ${ARGN})
  list(REMOVE_ITEM ARG_MODULES td_kernels)
  list(TRANSFORM ARG_MODULES REPLACE "^td_" "")
  string(TOUPPER "${CMAKE_BUILD_TYPE}" type)
  set(flags ${CMAKE_BUILD_TYPE} ${CMAKE_C_FLAGS} ${CMAKE_C_FLAGS_${type}})
  if(TANDEM_SANITIZE)
    list(APPEND flags sanitize)
  endif()
  set(backends cpu)
  set(cuda "")
  if(TANDEM_HAVE_CUDA)
    list(APPEND backends cuda)
    set(cuda "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION} ${CMAKE_CUDA_FLAGS} ${CMAKE_CUDA_FLAGS_${type}}")
  endif()
  list(JOIN flags " " flags)
  list(JOIN backends " " backends)
  string(REPLACE ";" " " architectures "${TANDEM_CUDA_BUILT}")
  add_custom_target(td_build_values BYPRODUCTS "${ARG_OUT}" VERBATIM
    COMMAND "${CMAKE_COMMAND}" "-DOUT=${ARG_OUT}" "-DTEMPLATE=${CMAKE_CURRENT_SOURCE_DIR}/${ARG_TEMPLATE}"
            "-DSOURCE=${PROJECT_SOURCE_DIR}" "-DCC=${CMAKE_C_COMPILER}" "-DMODULES=${ARG_MODULES}" "-DVERSION=${PROJECT_VERSION}"
            "-DCOMPILER=${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}" "-DMARCH=${TANDEM_MARCH}"
            "-DFLAGS=${flags}" "-DCUDA=${cuda}" "-DARCHITECTURES=${architectures}" "-DBACKENDS=${backends}"
            -P "${PROJECT_SOURCE_DIR}/cmake/build.cmake"
    COMMENT "Describing the build")
  add_dependencies(td_base td_build_values)
endfunction()
